"""Drafters: one a file, found by vLLM's name of the method."""
