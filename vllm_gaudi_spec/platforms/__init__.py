"""Platform classes: the hooks that vLLM calls."""
