"""Encoder attention for images and audio on devices that capture steps. Importing this module replaces vLLM's version.

S: tokens in all sequences of an encoder call. E: sequences.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.upstream.layers import MMEncoderAttention


@MMEncoderAttention.register_oot
class MaskedEncoderAttention(MMEncoderAttention):
    """Encoder attention that uses a mask to separate sequences.

    vLLM's layer reads sequence boundaries on the host and splits tokens there. In a captured graph, that would require
    a device-to-host sync, and shapes would depend on the sequence lengths.
    """

    def forward_oot(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, num_queries = query.shape[:2]
        parts = self.view_qkv_to_4d(query, key, value, batch, num_queries, key.shape[1])
        query_BHSD, key_BHSD, value_BHSD = (part.transpose(1, 2) for part in parts)
        if self.num_queries_per_kv > 1:
            key_BHSD, value_BHSD = (
                part.repeat_interleave(self.num_queries_per_kv, dim=1) for part in (key_BHSD, value_BHSD)
            )
        scores_BHSS = torch.matmul(query_BHSD * self.scale, key_BHSD.transpose(2, 3)).float()
        if cu_seqlens is not None:
            sequence_S = number_sequences(cu_seqlens, num_queries)
            scores_BHSS = scores_BHSS.masked_fill(sequence_S[:, None] != sequence_S, -torch.inf)
        weights_BHSS = torch.softmax(scores_BHSS, dim=-1).to(value_BHSD.dtype)
        output = torch.matmul(weights_BHSS, value_BHSD).transpose(1, 2)
        # Restore the query's shape.
        return output.reshape(batch, num_queries, -1) if query.dim() != 4 else output.contiguous()


def number_sequences(ends_E: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the index of the sequence that each token belongs to, int32 [S].

    `ends_E` contains 0, then the end of each sequence. Tokens after the last end form one more sequence.
    """
    tokens_S = torch.arange(num_tokens, dtype=torch.int32, device=ends_E.device)
    return (tokens_S[:, None] >= ends_E[1:].int()).int().sum(dim=1, dtype=torch.int32)
