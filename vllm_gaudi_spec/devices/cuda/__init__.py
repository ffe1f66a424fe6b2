"""The NVIDIA GPU backend, which serves as a reference."""
