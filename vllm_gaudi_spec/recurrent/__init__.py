"""Layers with a recurrent state: vLLM's layers, their states, and how these states follow the target."""
