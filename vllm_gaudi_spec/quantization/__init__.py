"""Quantized checkpoints, and FP8 based on the files, configuration, and arithmetic of Intel Neural Compressor."""
