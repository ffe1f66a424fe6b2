"""Where attention is told on the host how long rows may be, it reads no key behind that: a CPU plays such a device.

Steps overlap where the drafter allows it, so the host's word is one that does not wait.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.full_tests import rule_models
from tests.full_tests.engines import engine
from tests.full_tests.heads import greedy
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.workload import Answer, Request, mixed_requests, run_together
from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.devices import load_backend
from vllm_gaudi_spec.devices.cpu import backend as cpu

# A KV block of 16: bounds that end in one, begin one, and reach into the last that a row can have.
SIZES: dict[str, Any] = dict(max_num_seqs=6, max_model_len=512, max_num_batched_tokens=64, block_size=16)


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes the CPU ask, and believe, that rows are so much shorter than the runner says."""
    backend, visible = cpu.make_backend(), padded.visible
    monkeypatch.setattr(backend.attention, "supports_attention", lambda spec: False)
    asking = replace(backend, traits=replace(backend.traits, needs_host_lengths=True))
    monkeypatch.setattr(cpu, "make_backend", lambda: asking)
    load_backend.cache_clear()

    def cut(by: int, call: AttentionCall, spec: AttentionLayerSpec) -> torch.Tensor:
        assert call.host_lengths_B is not None
        seen = visible(call, spec)
        return seen & (torch.arange(seen.shape[-1]) < call.host_lengths_B[:, None, None] - by)

    def choose(by: int) -> None:
        monkeypatch.setattr(padded, "visible", lambda call, spec: cut(by, call, spec))

    yield choose
    load_backend.cache_clear()


@pytest.fixture(scope="module")
def told() -> list[Request]:
    prompts = [*rule_models.prompts(4), *rule_models.prompts(2, length=100, seed=2)]
    return [Request(f"{len(prompt)} tokens", prompt, greedy(64, detokenize=False)) for prompt in prompts]


@pytest.fixture(scope="module")
def rule_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(rule_models.make_target(tmp_path_factory.mktemp("rule") / "target"))


def check(requests: list[Request], answers: list[list[Answer]]) -> None:
    for request, (answer,) in zip(requests, answers, strict=True):
        assert answer.token_ids == rule_models.continuation(request.prompt, 64), request.name


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_no_row_is_longer_than_the_host_said(
    method: str, shortened: Callable[[int], None], rule_target: str, told: list[Request], tmp_path: Path
) -> None:
    config = {
        "eagle3": lambda: dict(method=method, model=str(rule_models.make_eagle3(tmp_path)), num_speculative_tokens=4),
        "ngram": lambda: ngram(3),
    }[method]()
    shortened(0)
    with speculating(rule_target, config, skip_tokenizer_init=True, **SIZES) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling is (method != "ngram")
        check(told, run_together(llm, told))
        assert accepted(llm) > 50


@pytest.mark.parametrize("method", ["draft_model", pytest.param("universal_draft", marks=pytest.mark.slow)])
def test_nor_for_a_drafter_that_is_a_model(
    method: str, shortened: Callable[[int], None], looping_llama: str, twin: str
) -> None:
    """With the host's word it drafts, and is right, as if everything could be read."""
    requests = mixed_requests(12)
    own = dict(method=method, model=looping_llama if method == "draft_model" else twin, num_speculative_tokens=3)
    slem = dict(universal_context="retokenize", universal_match="slem") if method == "universal_draft" else {}
    seen = []
    for by in (-SIZES["max_model_len"], 0):
        shortened(by)
        with speculating(looping_llama, own, additional_config=dict(gaudi_spec=slem), **SIZES) as llm:
            answers = run_together(llm, requests)
            seen.append(([answer.token_ids for each in answers for answer in each], accepted(llm)))
    assert seen[0] == seen[1]
    assert seen[0][1] > 50


@pytest.mark.parametrize("by", [0, 2])
def test_the_hosts_word_is_what_decides(
    by: int, shortened: Callable[[int], None], rule_target: str, told: list[Request]
) -> None:
    """A token follows from the last two, so to hide the one before the newest is enough."""
    shortened(by)
    with engine(rule_target, skip_tokenizer_init=True, **SIZES) as llm:
        answers = run_together(llm, told)
    if by:
        with pytest.raises(AssertionError, match="tokens"):
            check(told, answers)
    else:
        check(told, answers)
