"""Drafters. Each has its own file and a row in `methods.py`."""
