"""Sizes of the buffers that each request needs in addition to its KV and recurrent states.

These functions are used by both the server and `gaudi-spec doctor`, which loads no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.sampling.params import Sampling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.runner.shapes import Shapes


def get_history_len(shapes: Shapes, num_drafts: int) -> int:
    """Return the maximum number of tokens in the history of a row, including drafts."""
    return shapes.max_context + 1 + num_drafts


def make_hidden_states(
    max_rows: int,
    shapes: Shapes,
    num_drafts: int,
    output_format: tuple[int, torch.dtype],
    carried_size: int | None,
    device: torch.device,
) -> HiddenStateBuffer:
    """Allocate the buffer. `output_format` is the size and dtype of a forward pass's output per token."""
    hidden_size, dtype = output_format
    return HiddenStateBuffer(
        num_rows=max_rows + 1,
        num_queries=1 + num_drafts,
        max_chunk_tokens=shapes.largest_prefill,
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
        carried_size=carried_size,
    )


def count_row_bytes(
    vllm_config: VllmConfig,
    shapes: Shapes,
    num_drafts: int,
    output_format: tuple[int, torch.dtype],
    carried_size: int | None,
) -> dict[str, int]:
    """Return the number of bytes that these buffers need, by purpose."""
    max_rows = vllm_config.scheduler_config.max_num_seqs
    states = make_hidden_states(max_rows, shapes, num_drafts, output_format, carried_size, torch.device("meta"))
    return {
        "token histories of all sequences": Requests.count_history_bytes(max_rows, get_history_len(shapes, num_drafts)),
        "hidden states of all sequences and of a step's prompt chunks": states.num_bytes,
        "sampling parameters of all sequences": Sampling.count_bytes(
            max_rows, vllm_config.model_config.get_vocab_size()
        ),
    }
