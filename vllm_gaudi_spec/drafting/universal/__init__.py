"""Drafting with any model for any target, even if their vocabularies differ.

token_bytes.py determines the bytes that each token stands for, and vocab_map.py matches the tokens of two models.
pairs.py does both for the configured models. timeline.py converts a row's text to the drafter's tokens and converts
drafts to the target's tokens, using encoder.py. text_drafting.py uses these modules to draft.
"""
