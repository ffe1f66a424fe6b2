"""Checks of what this engine takes for granted of a card, on the card itself, before anything is served on it.

What is captured for it is called `self_test_...` in reports of graphs.
"""
