"""NVIDIA GPUs, as a reference."""
