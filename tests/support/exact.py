"""The distribution of one and of two steps of a rule, by enumeration of all drafts instead of sampling.

The functions that the rule itself calls define what it does with its noise: the probabilities with which it
accepts, and the residual it samples from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tests.support.distributions import Table, text_probs
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.rules import block, standard

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# (target probs, draft probs, drafts, number of drafts) -> P(stop at offset), weight of the target there: [N, Q] each
StopProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def standard_stops(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    accept = standard.accept_probs(*inputs).double()
    ones = torch.ones(len(accept), 1, dtype=torch.float64)
    reach = torch.cat((ones, accept.cumprod(1)), 1)
    return reach * (1 - torch.cat((accept, 0 * ones), 1)), torch.ones_like(reach)


def block_stops(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    accept, weights = block.accept_probs(*inputs)
    ones = torch.ones(len(accept), 1, dtype=torch.float64)
    accept = torch.cat((ones, accept.double()), 1)
    not_longer = torch.cat(((1 - accept[:, 1:]).flip(1).cumprod(1).flip(1), ones), 1)
    return accept * not_longer, weights.double()


@dataclass
class StepDistribution:
    emitted: list[np.ndarray]
    """[N, V ** n] for n = 1 to K + 1: probability that the step emits exactly these n tokens."""
    mean_accepted: np.ndarray
    """[N]"""


def step_distribution(
    stops: StopProbs, target: Table, drafter: Table, contexts: np.ndarray, num_positions: int, num_drafts: np.ndarray
) -> StepDistribution:
    """Return the distribution of one step after each of N contexts, with a number of drafts for each."""
    vocab, rows = target.vocab, len(contexts)
    blocks = vocab**num_positions
    drafts = np.stack(np.unravel_index(np.arange(blocks), (vocab,) * num_positions), 1)
    now, at_offset = np.repeat(contexts, blocks), []
    drafts_all = np.tile(drafts, (rows, 1))
    for offset in range(num_positions + 1):
        at_offset.append(now)
        if offset < num_positions:
            now = target.after(now, drafts_all[:, offset])
    probs = torch.stack([target.logits_CV[c].softmax(-1) for c in at_offset], 1)
    draft_probs = torch.stack([drafter.logits_CV[c].softmax(-1) for c in at_offset[:num_positions]], 1)
    num = torch.from_numpy(np.repeat(num_drafts, blocks)).int()
    stop_probs, weights = stops(probs[:, :num_positions], draft_probs, torch.from_numpy(drafts_all).int(), num)
    chance = np.ones(len(now))
    for offset in range(num_positions):
        chance = chance * drafter.probs_CV[at_offset[offset], drafts_all[:, offset]]
    emitted = []
    for offset in range(num_positions + 1):
        whole = num <= offset
        draft = draft_probs[:, min(offset, num_positions - 1)]
        left = stop.compute_residual(probs[:, offset], draft, weights[:, offset].float())
        usable = (~whole & (left.amax(-1) > 0))[:, None]
        last = torch.where(usable, left, probs[:, offset]).double()
        last = (last / last.sum(-1, keepdim=True)).numpy()
        joint = (chance * stop_probs[:, offset].numpy())[:, None] * last
        # The drafts after the offset are summed over.
        shape = (rows, vocab**offset, vocab ** (num_positions - offset), vocab)
        emitted.append(joint.reshape(shape).sum(2).reshape(rows, -1))
    mean = sum(offset * probs.sum(1) for offset, probs in enumerate(emitted))
    return StepDistribution(emitted, np.asarray(mean))


def completed(parts: Iterator[tuple[np.ndarray, np.ndarray]], target: Table, length: int) -> np.ndarray:
    """Return [N, V ** L]: texts of several lengths, completed by ordinary sampling.

    `parts` holds their probabilities and the contexts after them.
    """
    total: np.ndarray | float = 0.0
    for probs, contexts in parts:
        rows, texts = probs.shape
        missing = length - round(np.log(texts) / np.log(target.vocab))
        rest = text_probs(target, missing, contexts.reshape(-1)).reshape(rows, texts, -1)
        total = total + (probs[..., None] * rest).reshape(rows, -1)
    assert isinstance(total, np.ndarray)
    return total


def contexts_after(target: Table, contexts: np.ndarray, length: int) -> np.ndarray:
    """Return [N, V ** length]: the context after each text of a length."""
    now = contexts[:, None]
    for _ in range(length):
        now = target.after(now[..., None], np.arange(target.vocab)).reshape(len(contexts), -1)
    return now


def two_step_text(
    stops: StopProbs, target: Table, drafter: Table, num_positions: int, num_drafts: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Return [V ** 2(K + 1)]: the joint distribution of the text of two steps, completed by ordinary sampling.

    `num_drafts(n)` returns the numbers of drafts of n rows, which may depend on the text before.
    """
    start = np.zeros(1, dtype=np.int64)
    length = 2 * (num_positions + 1)
    total = np.zeros(target.vocab**length)
    first = step_distribution(stops, target, drafter, start, num_positions, num_drafts(1))
    for n, probs in enumerate(first.emitted):
        contexts = contexts_after(target, start, n + 1)[0]
        second = step_distribution(stops, target, drafter, contexts, num_positions, num_drafts(len(contexts)))
        parts = ((part, contexts_after(target, contexts, m + 1)) for m, part in enumerate(second.emitted))
        total += (probs[0][:, None] * completed(parts, target, length - n - 1)).reshape(-1)
    return total
