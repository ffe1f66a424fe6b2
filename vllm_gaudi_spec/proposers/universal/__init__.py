"""Drafting with any model for any target: where two vocabularies meet.

token_bytes.py reads what each token of a tokenizer stands for; vocab_map.py pairs the tokens of two models.
"""
