"""Layers with a recurrent state: what it is, how it follows the target, and the layers of vLLM's that have one."""
