"""Decisions about how many tokens to draft, made in vLLM's scheduler so that all ranks get the same decision."""
