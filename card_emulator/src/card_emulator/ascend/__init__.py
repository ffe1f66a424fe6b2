"""An emulated CANN: what is below Huawei's own torch_npu."""
