"""The platform classes: the hooks that vLLM calls."""
