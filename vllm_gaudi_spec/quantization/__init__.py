"""Quantized checkpoints, and FP8 that follows Intel Neural Compressor's files, configuration, and arithmetic."""
