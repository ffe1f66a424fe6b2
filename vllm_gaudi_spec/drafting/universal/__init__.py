"""Drafting with any model for any target: where two vocabularies meet.

token_bytes.py reads what each token of a tokenizer stands for, vocab_map.py pairs the tokens of two models, and
pairs.py does so for the models at hand. timeline.py keeps a row's text as the drafter reads it and rewriting.py writes
its drafts in the target's tokens, both over encoder.py. coverage.py warns where too little is shared.
"""
