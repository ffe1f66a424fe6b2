"""The Intel Gaudi backend."""
