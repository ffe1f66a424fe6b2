"""Drafting with any model for any target: where two vocabularies meet.

token_bytes.py reads what each token of a tokenizer stands for, vocab_map.py pairs the tokens of two models, and
pairs.py does so for the models at hand and warns where too little is shared. timeline.py keeps a row's text as the
drafter reads it and writes its drafts in the target's tokens, over encoder.py. text_drafting.py drafts over both.
"""
