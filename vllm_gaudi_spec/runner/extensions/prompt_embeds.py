"""Prompts of embeddings in place of tokens (`--enable-prompt-embeds`), merged in the forward like those of images.

N: positions that are embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import MultimodalInputs
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.upstream.platforms import supports_kw

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Batch, Request


class PromptEmbeds(Extension):
    def __init__(self, model_config: ModelConfig, model: nn.Module, backend: DeviceBackend) -> None:
        if not supports_kw(model.forward, "inputs_embeds"):
            raise UnsupportedConfigError(
                f"vLLM's {model_config.architecture} takes no embeddings; leave out --enable-prompt-embeds."
            )
        if getattr(model_config.hf_text_config, "hidden_size_per_layer_input", 0):
            raise UnsupportedConfigError(
                f"Layers of {model_config.architecture} take embeddings of tokens of their own, which prompt "
                "embeddings do not have; leave out --enable-prompt-embeds."
            )
        self._dtype = model_config.dtype
        self._upload = backend.memory.upload

    def add_to(self, batch: Batch) -> Batch:
        """Return the batch with the embeddings of its positions.

        The last position of a prompt may come as a decode.
        """
        is_embeds_np = np.zeros((batch.shape.rows, batch.shape.queries), dtype=bool)
        chunks = []
        for row_np, request, count in zip(
            is_embeds_np, batch.requests, batch.counts, strict=False
        ):  # the rest is padding
            if (found := _slice_chunk(request, count)) is not None:
                chunk_LH, is_embeds_L = found
                row_np[: len(chunk_LH)] = is_embeds_L
                chunks.append(chunk_LH[torch.from_numpy(is_embeds_L)])
        if not is_embeds_np.any():
            return batch
        media = (batch.multimodal or MultimodalInputs())._replace(
            embeds_NH=self._upload(torch.cat(chunks).to(self._dtype)),
            is_embeds_T=self._upload(torch.from_numpy(is_embeds_np.reshape(-1))),
        )
        return replace(batch, multimodal=media)


def _slice_chunk(request: Request, count: int) -> tuple[torch.Tensor, np.ndarray] | None:
    """Return [L, H] of the next `count` positions that belong to the prompt, and which of them are embeddings."""
    if request.embeds is None:
        return None
    chunk = slice(request.num_computed, request.num_computed + count)
    return request.embeds.rows_LH[chunk], request.embeds.is_embeds_np[chunk]
