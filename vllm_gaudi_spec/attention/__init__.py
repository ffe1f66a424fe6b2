"""The attention backend that vLLM's model classes call, and what describes one call to it."""
