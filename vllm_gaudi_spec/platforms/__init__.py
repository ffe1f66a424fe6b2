"""Platform classes, which implement the hooks that vLLM calls."""
