"""DFlash, DFlash2 and DSpark through the engine: the logits of every block equal a dense reference, whatever the
engine's schedule, and drafts change no text."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.full_tests import quantized
from tests.full_tests.block_drafters import KINDS, BlockReference, make_drafter
from tests.full_tests.engines import by_label, counter, engine, first_tokens, generate, preemptions
from tests.full_tests.heads import MAX_LEN, greedy, target, texts
from tests.full_tests.speculation import accounts, record_drafts, speculating
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.drafting import block
from vllm_gaudi_spec.metrics import ROWS_WITHOUT_DRAFTS
from vllm_gaudi_spec.quantization import files

K, NUM_TOKENS = 4, 12
TARGET = target("dflash")
PROMPTS = texts()[-9:]
"""Around the borders of chunks and blocks."""
SMALL = dict(kv_cache_memory_bytes=2 << 20, block_size=32)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": dict(max_num_batched_tokens=64, enable_prefix_caching=False),
    "one by one": dict(async_scheduling=False),
}
# test_published_drafters.py has quick cases of DFlash2 and DSpark.
QUICK = [("dflash", "chunked"), ("dspark reduced vocabulary", "one by one")]
ALL = [(name, schedule) for name in KINDS for schedule in SCHEDULES]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("block")

    @cache
    def make(name: str) -> str:
        return make_drafter(folder / name.replace(" ", "-"), KINDS[name], TARGET)

    return make


class Recorder:
    """Records the lengths and logits of the first row of each round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[tuple[int, list[int], list[torch.Tensor]]] = []
        propose, make_scores = block.BlockProposer.propose, block.BlockProposer._make_scores

        def record_propose(proposer: Any, request: Any) -> Any:
            self._logits: list[torch.Tensor] = []
            drafts = propose(proposer, request)
            if request.max_drafts_B[0] == request.num_drafts:  # not a warm-up run, and not at the end of a text
                self.rounds.append((int(request.lengths_B[0]), drafts.tokens_BK[0].tolist(), self._logits))
            return drafts

        def record_scores(*args: Any) -> Any:
            score = make_scores(*args)

            def record(step: int, previous_B: torch.Tensor) -> torch.Tensor:
                logits_BV = score(step, previous_B)
                self._logits.append(logits_BV[0].clone())
                return logits_BV

            return record

        monkeypatch.setattr(block.BlockProposer, "propose", record_propose)
        monkeypatch.setattr(block.BlockProposer, "_make_scores", record_scores)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine(TARGET, max_model_len=MAX_LEN) as llm:
        return first_tokens(generate(llm, PROMPTS, greedy(NUM_TOKENS)))


@pytest.mark.parametrize(("name", "schedule"), quick_and_slow(QUICK, ALL))
def test_logits_of_every_block_equal_the_reference(
    name: str, schedule: str, drafter: Callable[[str], str], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = BlockReference(drafter(name), TARGET)
    recorder = Recorder(monkeypatch)
    config = dict(method=KINDS[name].method, model=drafter(name), num_speculative_tokens=K)
    num_compared = 0
    with speculating(TARGET, config, max_model_len=MAX_LEN, **SCHEDULES[schedule]) as llm:
        for prompt, expected in zip(PROMPTS, plain, strict=True):
            recorder.rounds.clear()
            output = first_tokens(generate(llm, [prompt], greedy(NUM_TOKENS)))[0]
            assert output == expected
            for length, drafts, logits in recorder.rounds:
                wanted_KV = reference.block_logits([*prompt, *output][:length], drafts)
                torch.testing.assert_close(torch.stack(logits), wanted_KV, atol=1e-4, rtol=1e-4)
                num_compared += 1
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
    assert num_compared > len(PROMPTS) * 4


@pytest.mark.emulated
@pytest.mark.every_card
@pytest.mark.parametrize("name", quick_and_slow(["dflash2"], KINDS))
def test_drafts_on_a_card_are_those_of_the_reference(
    name: str, drafter: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts_on_card(name, drafter(name), monkeypatch)


def check_drafts_on_card(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs do not let a test record logits."""
    reference = BlockReference(folder, TARGET)
    drafts: list[list[int]] = []
    update = Scheduler.update_draft_token_ids

    def record(scheduler: Scheduler, taken: Any) -> None:
        drafts.extend(tokens for tokens in taken.draft_token_ids if tokens)
        update(scheduler, taken)

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", record)
    config = dict(method=KINDS[name].method, model=folder, num_speculative_tokens=K)
    options = dict(max_model_len=128, max_num_batched_tokens=64, max_num_seqs=2, async_scheduling=False)
    with speculating(TARGET, config, **options) as llm:
        for prompt in (PROMPTS[1], PROMPTS[5]):
            drafts.clear()
            outputs = generate(llm, [prompt], greedy(NUM_TOKENS))
            output, (account,) = first_tokens(outputs)[0], accounts(outputs)
            assert output == reference.continue_text(prompt, NUM_TOKENS)
            length, num_compared = len(prompt) + 1, 0
            for tokens, num_accepted in zip(drafts, account.accepted, strict=False):
                check_greedy(tokens, [*prompt, *output][:length], reference, 1e-3)
                length += 1 + num_accepted
                num_compared += len(tokens)
            assert num_compared > NUM_TOKENS
        report = llm.collective_rpc("step_report")[0]
        assert report["host_syncs_per_step"] <= 1


def check_greedy(drafts: list[int], text: Sequence[int], reference: BlockReference, tolerance: float) -> None:
    """Check that every draft is the reference's best token, or tied with it."""
    whole = [*drafts, *[0] * (K - len(drafts))]
    logits_KV = reference.block_logits(list(text), whole)[: len(drafts)]
    best_K, chosen_K = logits_KV.max(1).values, logits_KV[range(len(drafts)), drafts]
    torch.testing.assert_close(chosen_K, best_K, atol=tolerance, rtol=tolerance)


DRAFTED = itertools.product(("dflash", "dflash2", "dspark"), ("greedy", "coupled", "probabilistic"))


@pytest.mark.parametrize(("name", "sampling"), quick_and_slow([("dflash2", "coupled")], DRAFTED))
def test_drafts_of_crowded_rows(
    name: str, sampling: str, drafter: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows share steps, prefixes and too few KV blocks, greedy and seeded. Texts are those without drafts, and greedy
    drafts are the reference's, also behind texts that were read without drafting."""
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=40, ignore_eos=True, detokenize=False)
        for index in range(len(texts()))
    ]
    rule = dict(rejection_sample_method="strict", draft_sample_method=sampling)
    config = dict(method=KINDS[name].method, model=drafter(name), num_speculative_tokens=K)
    options: dict[str, Any] = dict(max_model_len=MAX_LEN, max_num_batched_tokens=96) | SMALL
    with engine(TARGET, **options) as llm:
        expected = first_tokens(generate(llm, texts(), params))
    drafts = record_drafts(monkeypatch)
    with speculating(TARGET, config | rule, async_scheduling=False, **options) as llm:
        assert first_tokens(generate(llm, texts(), params)) == expected
        assert preemptions(llm) > 0
        generate(llm, texts()[-2:], greedy(40, extra_args={REQUEST_OPTION: 0}))
        assert first_tokens(generate(llm, texts()[-2:], params[-2:])) == expected[-2:]
        assert counter(llm, "vllm:prefix_cache_hits") > 0
    reference, whole = BlockReference(drafter(name), TARGET), [p + e for p, e in zip(texts(), expected, strict=True)]
    compared = [text for text in drafts if any(list(text) == row[: len(text)] for row in whole[::2])][::4]
    assert len(compared) > 40
    for text in compared:
        check_greedy(drafts[text], text, reference, 1e-4)


def test_rows_beyond_the_drafter_decode_without_drafts(tmp_path: Path) -> None:
    """A drafter of 128 positions drafts for a row until its block would reach beyond them."""
    folder = make_drafter(tmp_path / "short", KINDS["dflash"], TARGET)
    config = dict(method="dflash", model=folder, num_speculative_tokens=K, max_model_len=128)
    prompts = [texts()[0][:20], texts()[-1]]
    with engine(TARGET, max_model_len=MAX_LEN) as llm:
        expected = first_tokens(generate(llm, prompts, greedy(130)))
    with speculating(TARGET, config, max_model_len=MAX_LEN) as llm:
        outputs = generate(llm, prompts, greedy(130))
        reasons = by_label(llm, ROWS_WITHOUT_DRAFTS, "reason")
        assert {reason for reason, count in reasons.items() if count} - {"ending"} == {"length"}
    assert first_tokens(outputs) == expected
    short, long = accounts(outputs)
    # The first token comes without drafts, and a step yields one token more than it accepts.
    length = len(prompts[0]) + 1 + len(short.accepted) + sum(short.accepted)
    assert 128 - 2 * K < length <= 128
    assert set(short.drafted) == {K}  # a block that does not fit is not drafted in part
    assert not long.drafted


@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_layers_beside_the_forward_are_calibrated(
    name: str, drafter: Callable[[str], str], plain: list[list[int]], tmp_path: Path
) -> None:
    """DFlash2's selector and DSpark's bias choose draft tokens between the drafter's forward and the next."""
    config = dict(method=KINDS[name].method, model=drafter(name), num_speculative_tokens=K)
    found = quantized.calibrate(tmp_path, TARGET, config, max_model_len=MAX_LEN)
    (record,) = files.read_world(found.prefix("draft"))
    assert set(record.nodes) == set(record.looked_at)
    in_fp8 = quantized.drafter(found.serving("draft", "maxabs_pow2"))
    with engine(TARGET, speculative_config=config, max_model_len=MAX_LEN, **in_fp8) as llm:
        assert first_tokens(generate(llm, PROMPTS, greedy(NUM_TOKENS))) == plain
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 0
