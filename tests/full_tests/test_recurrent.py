"""Models with recurrent layers: whatever is accepted, chunked, preempted or beside it, a request gives the tokens that
it gives without drafts; those of greedy ones are transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.full_tests import drafters, tiny_models
from tests.full_tests.engines import counter, engine, first_tokens, generate, preemptions
from tests.full_tests.speculation import accepted, custom, ngram, speculating
from tests.full_tests.workload import Answer, Request, check_same, mixed_requests, run_together
from tests.models import checkpoints
from tests.models.run import CASES

CASE = "qwen3-next"
SIZES: dict[str, Any] = dict(max_num_seqs=8)
# Prompts come in several chunks, and there is room for two of the longest requests.
BUSY: dict[str, Any] = SIZES | dict(max_num_batched_tokens=64, block_size=32, num_gpu_blocks_override=17)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.make(CASE, CASES[CASE], tmp_path_factory.mktemp("recurrent")))


@pytest.fixture(scope="module")
def plain(model: str, requests: list[Request]) -> list[list[Answer]]:
    """What it answers without drafts."""
    with engine(model, **SIZES) as llm:
        return run_together(llm, requests)


def nearly_right(requests: list[Request], answers: list[list[Answer]]) -> drafters.Write:
    """Drafts of what follows, with a mistake at every position in turn, and none."""
    texts = [[*request.prompt, *one.token_ids] for request, some in zip(requests, answers, strict=True) for one in some]

    def write(context: list[int], k: int) -> list[int]:
        text = next((text for text in texts if text[: len(context)] == context), context)
        drafts = (text[len(context) :] + [2] * k)[:k]
        if (wrong := len(context) % (k + 1)) < k:
            drafts[wrong] = 3 if drafts[wrong] == 2 else 2
        return drafts

    return write


def size_of(states: Any) -> int:
    tensors = [value for value in vars(states).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize("num_drafts", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 5))])
def test_drafts_change_nothing(num_drafts: int, model: str, plain: list[list[Answer]], requests: list[Request]) -> None:
    """In chunks, preempted, and with every number of drafts accepted; and greedy texts are those of transformers."""
    reference = json.loads((Path(model) / checkpoints.REFERENCE).read_text())
    greedy = SamplingParams(temperature=0, max_tokens=checkpoints.NUM_TOKENS, ignore_eos=True)
    known = [*requests, *(Request("greedy", prompt, greedy) for prompt in reference["prompts"])]
    texts = [*plain, *([Answer(tokens, "", None, None)] for tokens in reference["tokens"])]
    drafters.play(nearly_right(known, texts))
    with speculating(model, custom("Scripted", num_drafts), **BUSY) as llm:
        check_same(requests, run_together(llm, requests), plain)
        assert first_tokens(generate(llm, reference["prompts"], greedy)) == reference["tokens"]
        verified = counter(llm, "vllm:spec_decode_num_draft_tokens")
        assert 0.2 * verified < accepted(llm) < verified
        assert preemptions(llm) > 0
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        assert sum(runner.bytes_beside_kv().values()) == sum(map(size_of, runner.target.states.by_layer.values()))
        assert counter(llm, "vllm:prefix_cache_queries") == 0, "states are not cached by prefix"


@pytest.mark.slow
def test_drafts_on_the_device_overlapping(model: str, plain: list[list[Answer]], requests: list[Request]) -> None:
    """How many drafts were accepted is known on the device alone when the next step is prepared."""
    config = dict(ngram(3, lookup=(1, 3)), method="ngram_gpu")
    with speculating(model, config, async_scheduling=True, **BUSY) as llm:
        check_same(requests, run_together(llm, requests), plain)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 100


def test_its_own_layer_drafts(tmp_path: Path, requests: list[Request]) -> None:
    """MTP: a layer with attention alone, which reads the hidden states of a target that has states."""
    with_layer, some = tiny_models.save_qwen3_next_with_mtp(tmp_path), requests[:8]
    with engine(with_layer, **SIZES) as llm:
        plain = run_together(llm, some)
    with speculating(with_layer, dict(method="mtp", num_speculative_tokens=3), **BUSY) as llm:
        check_same(some, run_together(llm, some), plain)
        assert 0 < accepted(llm) < counter(llm, "vllm:spec_decode_num_draft_tokens")
        assert preemptions(llm) > 0
