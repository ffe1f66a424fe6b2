"""Acceptance rules, which compute tokens from logits, drafts and noise."""
