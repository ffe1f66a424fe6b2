"""Dense attention of one query over the keys that it sees: the reference for paged attention."""

from collections.abc import Sequence

import torch

from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec


def attend_one(
    query_HD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    position: int,
    layer: AttentionLayerSpec,
    span: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return float64 [H, D]. The query also sees the positions from the first to the last of `span`."""
    first = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
    if layer.attention_chunk is not None:
        first = max(first, position // layer.attention_chunk * layer.attention_chunk)
    seen = range(first, position + 1)
    if span is not None and span[0] <= position <= span[1]:
        seen = range(min(first, span[0]), span[1] + 1)
    keys, values = keys_SKD[seen.start : seen.stop].double(), values_SKD[seen.start : seen.stop].double()
    group = query_HD.shape[0] // keys.shape[1]
    out = []
    for head, query in enumerate(query_HD.double()):
        scores = keys[:, head // group] @ query * layer.scale
        if layer.logits_soft_cap:
            scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
        if layer.slopes_H is not None:
            scores = scores + layer.slopes_H[head].double() * (torch.arange(seen.start, seen.stop) - position)
        total = scores.logsumexp(0)
        if layer.sinks_H is not None:
            total = torch.logaddexp(total, layer.sinks_H[head].double())
        out.append((scores - total).exp() @ values[:, head // group])
    return torch.stack(out)


def attend_row(
    query_QHD: torch.Tensor,
    keys_NSKD: torch.Tensor,
    values_NSKD: torch.Tensor,
    blocks: dict[int, int],
    start: int,
    layer: AttentionLayerSpec,
    spans: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Return float64 [Q, H, D] of queries from `start` on.

    `blocks` maps an index in the row to a block. A missing block is read as NaN.
    """
    missing = torch.full_like(keys_NSKD[0], torch.nan)
    keys, values = (
        torch.cat([stored[blocks[index]] if index in blocks else missing for index in range(max(blocks) + 1)]).double()
        for stored in (keys_NSKD, values_NSKD)
    )
    out = []
    for q, query_HD in enumerate(query_QHD):
        position = start + q
        span = next((span for span in spans if span[0] <= position <= span[1]), None)
        out.append(attend_one(query_HD, keys, values, position, layer, span))
    return torch.stack(out)
