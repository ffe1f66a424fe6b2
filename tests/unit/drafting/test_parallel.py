"""Parallel drafters through vLLM's scheduler: what is accepted, and the distribution of sampled texts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.full_tests.tiny_models import byte_tokenizer
from tests.support.distributions import ALPHA, p_value
from tests.support.small_engine import _HASHED, PARALLEL, ROOMY, SmallEngine, Variant, _logits, _number
from tests.unit.test_config import engine_config
from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.metadata import Blocks, Inputs
from vllm_gaudi_spec.config import Speculation, UnsupportedConfigError
from vllm_gaudi_spec.drafting import parallel
from vllm_gaudi_spec.drafting.vocabulary import SameVocabulary
from vllm_gaudi_spec.records import Drafted, DraftRequest, Hidden


@pytest.mark.parametrize("is_head", [False, True])
def test_rows_read_a_mask_token_for_each_usable_draft_but_the_last(is_head: bool) -> None:
    """A row's KV blocks may end behind them."""
    vocab, mask, num_drafts, num_unread = 60, 55, 3, [2, 1, 1, 4]
    lengths, limits = torch.tensor([9, 5, 7, 8]).int(), torch.tensor([3, 0, 1, 2]).int()
    history = torch.arange(1, 49).int().view(4, 12)
    read: list[Inputs] = []

    def forward(inputs: Inputs, states_TH: torch.Tensor | None = None) -> Hidden:
        read.append(inputs)
        return Hidden(torch.zeros(len(inputs.token_ids_T), 1))

    model: Any = SimpleNamespace(forward=forward, logits=lambda hidden_NH: torch.zeros(len(hidden_NH), vocab))
    proposer: Any
    if is_head:
        proposer = parallel.ParallelHeadProposer(model, SameVocabulary(vocab, vocab), mask, torch.zeros(1))
        kept = [[] for _ in num_unread]
    else:
        proposer = parallel.ParallelModelProposer(model, SameVocabulary(vocab, vocab), mask)
        proposer.kv_sync = SimpleNamespace(count_read=lambda rows_B: lengths - torch.tensor(num_unread).int())
        kept = [history[row, n - num_unread[row] : n].tolist() for row, n in enumerate(lengths.tolist())]
    proposer.propose(
        DraftRequest(
            rows_B=torch.arange(4),
            history_RM=history,
            lengths_B=lengths,
            max_drafts_B=limits,
            num_drafts=num_drafts,
            blocks=Blocks((torch.arange(1, 13).int().view(4, 3),), (4,)),
            row_operations=row_operations.TORCH,
            choose=lambda logits_BV, position: Drafted(logits_BV.argmax(1).int(), None),
            hidden=Hidden(torch.zeros(4, 1)),
        )
    )
    width = num_drafts - 1 if is_head else 2 * num_drafts
    rows = [(tokens + [mask] * (limit - 1)) * (limit > 0) for tokens, limit in zip(kept, limits.tolist(), strict=True)]
    assert [inputs.token_ids_T.view(4, -1).tolist() for inputs in read] == [[t + [0] * (width - len(t)) for t in rows]]
    assert read[0].num_real_B.tolist() == [len(tokens) for tokens in rows]


def expected_texts(prompt: list[int], length: int, top_k: int) -> dict[tuple[int, ...], float]:
    """Return the probability of each text of `length` tokens at temperature 1."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, share in probs.items():
            tokens = torch.tensor([*prompt, *text])
            best = _logits(_number(tokens, torch.arange(len(tokens))).sum()[None] % _HASHED)[0].topk(top_k)
            shares = best.values.double().softmax(-1) * share
            longer |= {(*text, int(token)): float(one) for token, one in zip(best.indices, shares, strict=True)}
        probs = longer
    return probs


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_drafts_do_not_change_distribution(rule: str, tmp_path: Path) -> None:
    """The texts have a first token and two that were drafted."""
    prompt, num_seeds, top_k = [11, 12, 13], 1500, 3
    engine = SmallEngine(Variant(PARALLEL, num_blocks=ROOMY, num_drafts=2, rule=rule), tmp_path)
    for seed in range(num_seeds):
        engine.add(f"{seed}", prompt, SamplingParams(max_tokens=4, temperature=1, top_k=top_k, seed=seed))
    engine.finish()
    probs = expected_texts(prompt, 3, top_k)
    cells = {text: cell for cell, text in enumerate(probs)}
    sampled = np.array([cells[tuple(text[:3])] for text in engine.texts.values()])
    assert p_value(sampled, np.array([*probs.values()])) > ALPHA
    assert 0.7 < engine.num_accepted / engine.num_verified < 0.95


def draft_folder(folder: Path, **described: Any) -> str:
    engine_config(folder, None)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | described))
    return str(folder)


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_mask_token_is_read_from_checkpoint(name: str, tmp_path: Path) -> None:
    drafter = dict(method="draft_model", model=draft_folder(tmp_path / "drafter", **{name: 7}))
    for is_parallel, expected in ((True, 7), (False, None)):
        speculation = Speculation.from_vllm(engine_config(tmp_path, drafter | dict(parallel_drafting=is_parallel)))
        assert speculation.mask_token == expected


@pytest.mark.parametrize(
    ("described", "options", "message"),
    [
        ({}, {}, "specifies no mask token, .* leave parallel_drafting out"),
        (dict(pard_token=400), {}, "has the mask token 400, but a vocabulary of 400 tokens"),
        (dict(architectures=["PEagleDraftModel"], pard_token=5), {}, "set method to eagle3 and parallel_drafting"),
        (dict(pard_token=5), dict(method="eagle"), "parallel_drafting has no effect with method eagle"),
        (dict(pard_token=5), dict(method="universal_draft"), "parallel_drafting does not work with universal_context"),
    ],
    ids=str,
)
def test_unfit_drafter_is_refused(
    described: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    drafter = dict(method="draft_model", model=draft_folder(tmp_path / "drafter", **described), parallel_drafting=True)
    ours = {"universal_context": "retokenize"} if options.get("method") == "universal_draft" else {}
    with pytest.raises(UnsupportedConfigError, match=message):
        engine_config(tmp_path, drafter | options, additional_config={"gaudi_spec": ours})
