"""Drafters: one a file, each with a row in `methods.py`."""
