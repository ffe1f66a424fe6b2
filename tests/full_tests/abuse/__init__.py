"""Hostile requests, options and folders: nothing but an answer or a clear refusal, and nobody else notices."""
