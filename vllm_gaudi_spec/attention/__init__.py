"""The attention backend that vLLM's model classes call, and the metadata that describes each call."""
