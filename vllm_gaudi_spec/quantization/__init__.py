"""FP8 as in Intel Neural Compressor: its files and configuration, and exact arithmetic that follows them."""
