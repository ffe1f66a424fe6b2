"""The model runner, which executes steps, along with its state and tensor shapes."""
