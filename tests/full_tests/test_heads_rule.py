"""Heads that are never wrong as long as they are fed what they should be: each draft of every place is right.

Their target follows a rule, and one step off anywhere drafts noise (rule_models.py).
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests import rule_models
from tests.full_tests.engines import counter, engine, first_tokens, generate, preemptions
from tests.full_tests.speculation import accounts, speculating
from tests.support.marks import quick_and_slow, slow
from vllm_gaudi_spec.config import REQUEST_OPTION

METHODS = tuple(rule_models.HEADS)
NUM_TOKENS = 70
DRAFTED = "vllm:spec_decode_num_draft_tokens"
BARE = dict(skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16)
# The target takes 2 KiB of KV per token, its heads half as much at most: room for about three requests.
SMALL = dict(kv_cache_memory_bytes=1 << 20, block_size=16)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": dict(enable_prefix_caching=False),
    "one by one": dict(enable_prefix_caching=False, async_scheduling=False),
    "chunked": dict(enable_prefix_caching=False, max_num_batched_tokens=32),
    "cached": {},
    "preempted": SMALL | dict(enable_prefix_caching=False),
    # Eight drafts of each row take more of a step: with fewer tokens too few rows run to need so much KV.
    "chunked, cached, preempted": SMALL | dict(max_num_batched_tokens=64),
}

Pair = Callable[[str], tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The target for a method, and the configuration that names the head."""
    folder = tmp_path_factory.mktemp("rule")

    @cache
    def made(method: str) -> tuple[str, dict[str, Any]]:
        head = str(rule_models.HEADS[method](folder / method))
        if method == "mtp":
            return head, dict(method=method)
        return str(target(folder)), dict(method=method, model=head)

    @cache
    def target(folder: Path) -> Path:
        return rule_models.make_target(folder / "target")

    return made


def prompts() -> list[list[int]]:
    """Of 19 to 114 tokens; some share a beginning, and part at a block's border or beside it."""
    apart = rule_models.prompts(20)
    shared = rule_models.prompts(1, length=96, seed=1)[0]
    # A head looks one token back, and 17: here that is over the border.
    parting = [shared[:length] + apart[length % 7][:1] for length in (31, 32, 33, 47, 48, 49, 64)]
    return [*apart, shared, *parting]


QUICK = [
    ("eagle3", 2, "chunked, cached, preempted"),
    ("mtp", 4, "chunked, cached, preempted"),
    ("medusa", 4, "chunked, cached, preempted"),
]
ALL = [
    (method, k, schedule)
    for method in METHODS
    for k in (1, 2, 4, *([8] if method == "eagle" else []))
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("method", "k", "schedule"), quick_and_slow(QUICK, ALL))
def test_every_draft_is_right(method: str, k: int, schedule: str, pair: Pair) -> None:
    model, config = pair(method)
    asked, params = prompts(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with speculating(model, config | dict(num_speculative_tokens=k), **SCHEDULES[schedule], **BARE) as llm:
        for _ in range(2 if "cached" in schedule else 1):
            outputs = generate(llm, asked, params)
            for prompt, output in zip(asked, first_tokens(outputs), strict=True):
                assert output == rule_models.continuation(prompt, NUM_TOKENS)
            for prompt, (drafted, accepted) in zip(asked, accounts(outputs), strict=True):
                assert accepted == drafted, f"prompt of {len(prompt)}"
                # The first token comes without drafts, and a last one that is left over; so does one behind each
                # preemption.
                rounds = (NUM_TOKENS - 2 + k) // (k + 1)
                assert len(drafted) == rounds or "preempted" in schedule
        check_places(llm, k)
        assert (preemptions(llm) > 0) == ("preempted" in schedule)
        assert (counter(llm, "vllm:prefix_cache_hits") > 0) == ("cached" in schedule)
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_every_draft_is_right_in_long_contexts(method: str, tmp_path: Path) -> None:
    """Elsewhere acceptance ended at 32,768 tokens (vllm#52873), and at 65,536 (vllm-ascend#10495)."""
    longest, k = 70_000, 4
    head = rule_models.HEADS[method](tmp_path / method)
    model = head if method == "mtp" else rule_models.make_target(tmp_path / "target")
    for folder in {head, model}:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | dict(max_position_embeddings=1 << 17)))
    named = dict(method=method) | ({} if method == "mtp" else dict(model=str(head)))
    (text,) = rule_models.prompts(1, length=longest)
    sizes = dict(max_model_len=longest + 200, max_num_batched_tokens=512, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with speculating(
        str(model), named | dict(num_speculative_tokens=k), **BARE | sizes, kv_cache_memory_bytes=400 << 20
    ) as llm:
        for length in (32_768 - 30, 65_536 - 30, longest):
            prompt = [*text[: length - 1], text[-1]]
            (output,) = generate(llm, [prompt], params)
            assert first_tokens([output]) == [rule_models.continuation(prompt, NUM_TOKENS)]
            drafted, accepted = accounts([output])[0]
            assert accepted == drafted, f"prompt of {length}"
            assert len(drafted) == (NUM_TOKENS - 2 + k) // (k + 1)


def check_places(llm: LLM, k: int) -> None:
    """vLLM's own count: as many accepted at each place as were drafted there."""
    (per_place,) = (m.values for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos")
    assert len(per_place) == k
    assert sum(per_place) == counter(llm, DRAFTED) > 0


def sampled_params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=1.5, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        for index in range(len(prompts()))
    ]


@cache
def sample_plain_texts(model: str) -> list[list[int]]:
    """Return what the target says without drafts, sampled once for all of its drafters."""
    with engine(model, **BARE) as llm:
        return first_tokens(generate(llm, prompts(), sampled_params()))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sampled_requests_accept_what_the_rule_predicts(method: str, pair: Pair) -> None:
    """Drawn texts are those without drafts. Every third token breaks the rule: what is rejected has been read, and is
    read anew."""
    k, asked, (model, config) = 4, prompts(), pair(method)
    plain = sample_plain_texts(model)
    with speculating(model, config | dict(num_speculative_tokens=k), **BARE) as llm:
        outputs = generate(llm, asked, sampled_params())
    assert first_tokens(outputs) == plain
    for prompt, output, (drafted, accepted) in zip(asked, plain, accounts(outputs), strict=True):
        full = [count for count, wanted in zip(accepted, drafted, strict=True) if wanted == k]
        right = [sum(count > place for count in full) for place in range(k)]
        assert right == rule_models.accepted(prompt, output, k, blind=method == "medusa"), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("method", quick_and_slow(["eagle3"], ("eagle", "mtp")))
def test_head_reads_blocks_of_requests_that_do_not_draft(method: str, pair: Pair) -> None:
    """A second turn shares KV blocks with a first one that was answered without drafts."""
    model, config = pair(method)
    greedy: dict[str, Any] = dict(temperature=0, ignore_eos=True, detokenize=False)
    off = SamplingParams(max_tokens=NUM_TOKENS, extra_args={REQUEST_OPTION: 0}, **greedy)
    with speculating(model, config | dict(num_speculative_tokens=4), block_size=16, **BARE) as llm:
        first = first_tokens(generate(llm, prompts(), off))
        assert counter(llm, DRAFTED) == 0
        turns = [[*prompt, *answer] for prompt, answer in zip(prompts(), first, strict=True)]
        outputs = generate(llm, turns, SamplingParams(max_tokens=NUM_TOKENS, **greedy))
    for prompt, output, (drafted, accepted) in zip(prompts(), outputs, accounts(outputs), strict=True):
        assert output.num_cached_tokens > len(prompt)
        assert accepted == drafted
        assert sum(drafted) > NUM_TOKENS // 2


@pytest.mark.parametrize(
    ("method", "overlapping"),
    [
        ("eagle3", True),
        # vLLM does not overlap steps with Medusa.
        *slow(*((method, False) for method in METHODS), ("eagle", True), ("mtp", True)),
    ],
)
def test_head_drafts_again_when_the_load_falls(method: str, overlapping: bool, pair: Pair) -> None:
    """Up to two requests draft at first, four do not, and the last two have missed it all."""
    model, config = pair(method)
    by_load = dict(num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 64, 0]])
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in (NUM_TOKENS // 2, NUM_TOKENS // 2, 2 * NUM_TOKENS, 2 * NUM_TOKENS)
    ]
    with speculating(model, config | by_load, **BARE, async_scheduling=overlapping) as llm:
        outputs = generate(llm, prompts()[:4], params)
    for drafted, accepted in accounts(outputs)[2:]:
        assert accepted == drafted
        assert max(drafted) == 4
        assert sum(drafted) > NUM_TOKENS // 2
