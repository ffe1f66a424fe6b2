"""Drafting with any model for any target, even if their vocabularies differ.

token_bytes.py determines the bytes that each token represents, and vocab_map.py matches the tokens of two models.
pairs.py does both for the configured models. timeline.py converts the text of a row to drafter tokens and converts
drafts to target tokens, using encoder.py. text_drafting.py drafts with these modules.
"""
