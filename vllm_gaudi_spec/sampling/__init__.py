"""Sampling as pure, static-shape functions: logits in, tokens out. Nothing here waits for the device."""
