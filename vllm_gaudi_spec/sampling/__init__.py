"""Sampling as pure, static-shape functions: logits in, tokens out. No function waits for the device."""
