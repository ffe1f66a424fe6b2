"""Log-probabilities of prompt tokens: computed chunk by chunk, handed over when the prompt is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_gaudi_spec.sample.logprobs import gather_logprobs

if TYPE_CHECKING:
    from vllm_gaudi_spec.runner.batch import Batch
    from vllm_gaudi_spec.runner.loaded_model import LoadedModel
    from vllm_gaudi_spec.runner.requests import Request
    from vllm_gaudi_spec.runner.sampling import Sampling

# Logits of so many prompt positions at a time: a whole chunk's would not fit beside the KV cache.
_SLICE = 64


def collect(batch: Batch, hidden_TH: torch.Tensor, target: LoadedModel, sampling: Sampling) -> None:
    """Score the prompt tokens that this chunk predicts, for the requests that asked."""
    for index, request in enumerate(batch.requests):
        wanted = request.params.prompt_logprobs
        # After a preemption the outputs are prefilled too; then the prompt's scores are with the user already.
        if wanted is None or batch.shape.phase != "prefill" or len(request.known) > request.num_prompt:
            continue
        begin = request.num_computed
        end = min(begin + batch.counts[index], request.num_prompt - 1)
        rows = hidden_TH[index * batch.shape.queries :][: max(end - begin, 0)]
        following = torch.tensor(request.known[begin + 1 : end + 1], dtype=torch.int32, device=hidden_TH.device)
        for first in range(0, rows.shape[0], _SLICE):
            piece = slice(first, first + _SLICE)
            request.prompt_logprobs.append(
                _score(rows[piece], following[piece], wanted, target, sampling.logprobs_mode)
            )


def _score(
    hidden: torch.Tensor, tokens_N: torch.Tensor, wanted: int, target: LoadedModel, mode: str
) -> LogprobsTensors:
    """The last slice is padded to the size of the others, so that all have one shape."""
    num_real = hidden.shape[0]
    if num_real < _SLICE:
        hidden = torch.cat((hidden, hidden.new_zeros(_SLICE - num_real, hidden.shape[1])))
        tokens_N = torch.cat((tokens_N, tokens_N.new_zeros(_SLICE - num_real)))
    scores = target.logits(hidden)
    if mode.endswith("logprobs"):
        scores = scores.log_softmax(-1)
    result = gather_logprobs(scores, tokens_N, scores.shape[-1] if wanted < 0 else wanted)
    return LogprobsTensors(*(tensor[:num_real] for tensor in result[:3]))


def take(finishing: list[Request]) -> list[tuple[Request, LogprobsTensors]]:
    """What is complete with this step: vLLM wants a prompt's scores in the step that ends it, and not before."""
    done = []
    for request in finishing:
        if request.prompt_logprobs:
            done.append((request, LogprobsTensors.cat(request.prompt_logprobs)))
            request.prompt_logprobs = []
    return done
