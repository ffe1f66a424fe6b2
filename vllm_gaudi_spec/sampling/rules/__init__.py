"""Acceptance rules: logits, drafts and noise in, tokens out."""
