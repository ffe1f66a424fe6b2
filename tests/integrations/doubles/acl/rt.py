"""As much as is named when vllm-ascend is imported."""

memcpy = None
