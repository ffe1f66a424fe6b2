"""Layers with a recurrent state: vLLM's layers, the state that they keep, and how it follows the target."""
