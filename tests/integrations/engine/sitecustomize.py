"""Every Python process of an engine begins with this: Huawei's torch_npu over the emulated CANN.

vLLM looks at models in processes of their own, which import torch_npu by themselves: so it is this file, on the path
of the tests' engines alone, and not a call.
"""

import card_emulator
from vllm_gaudi_spec.environment import cache_folder, set_torch_npu_defaults, torch_npu_folder

set_torch_npu_defaults()
card_emulator.install_npu(torch_npu_folder(), cache_folder())
CARD = card_emulator.counted()
