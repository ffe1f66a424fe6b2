"""Tiny seeded checkpoints of many architectures and formats, each compared with what it should answer."""
