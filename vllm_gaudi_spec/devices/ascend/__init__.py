"""The Ascend NPU backend."""
