"""Log-probabilities that requests ask for, in the format that vLLM reports."""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors


def gather_logprobs(
    scores_NV: torch.Tensor, tokens_N: torch.Tensor, num_top: int, extra_ids_NE: torch.Tensor | None = None
) -> LogprobsTensors:
    """Gather the score and rank of the chosen token, and the `num_top` best scores or the scores of the given IDs.

    Column 0 contains the chosen token. As in vLLM, a rank counts all tokens with an equal or higher score.
    """
    chosen = tokens_N.long()[:, None]
    chosen_score = scores_NV.gather(-1, chosen)
    rank = (scores_NV >= chosen_score).sum(-1).int()
    if extra_ids_NE is not None:
        ids, scores = extra_ids_NE.long(), scores_NV.gather(-1, extra_ids_NE.long())
    else:
        scores, ids = scores_NV.topk(num_top, dim=-1)
    return LogprobsTensors(
        logprob_token_ids=torch.cat((chosen, ids), dim=1).int(),
        logprobs=torch.cat((chosen_score, scores), dim=1),
        selected_token_ranks=rank,
    )
