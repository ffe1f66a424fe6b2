"""The model runner, which executes steps, and its state and tensor shapes."""
