"""The attention backend that vLLM's model classes call, and the description of one call."""
