"""The model runner: one decode step, its state and its shapes."""
