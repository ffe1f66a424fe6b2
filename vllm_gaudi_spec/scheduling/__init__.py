"""Decisions about how many tokens to draft, made in vLLM's scheduler so that all ranks receive the same decision."""
