"""Layers with a recurrent state: vLLM's layers, what their state is, and how it follows the target."""
