"""Drafters. Each one has its own file and a row in `methods.py`."""
