"""The classes through which vLLM sees us: what it asks, and what we answer."""
