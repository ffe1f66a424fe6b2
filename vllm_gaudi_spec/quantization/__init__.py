"""Quantized checkpoints, and FP8 quantization that is compatible with Intel Neural Compressor."""
