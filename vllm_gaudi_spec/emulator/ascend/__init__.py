"""What is Ascend's own: NPU graphs with their task groups, streams, and torch_npu with its fused operations."""
