"""FP8 as Intel Neural Compressor does it: its files, its configuration, and what they mean, computed exactly."""
