"""An emulated CANN, the software below Huawei's torch_npu."""
