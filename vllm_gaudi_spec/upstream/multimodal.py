"""Encoders of images, audio and video, and the cache of their outputs.

Breaks when an encoder is run with other inputs, or the cache keeps its outputs in another form.
"""

from vllm.multimodal.encoder_budget import MultiModalBudget as MultiModalBudget
from vllm.multimodal.utils import get_mm_features_in_window as get_mm_features_in_window
from vllm.multimodal.utils import group_and_batch_mm_kwargs as group_and_batch_mm_kwargs
from vllm.v1.worker.gpu.attn_utils import compute_mm_prefix_ranges as compute_mm_prefix_ranges
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache as EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner as EncoderRunner
