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
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accepted, custom, ngram, speculating
from tests.full_tests.workload import Answer, Request, check_same, mixed_requests, run_together
from tests.models import checkpoints
from tests.models.run import CASES, check
from tests.support.marks import slow
from vllm_gaudi_spec.recurrent import table
from vllm_gaudi_spec.tools.doctor.layers import num_layers_with_kv, state_bytes

CASE = "qwen3-next"
"""Its layers have a state and a convolution."""
OTHERS = ("granite4-hybrid", "falcon-h1", "nemotron-h", "zamba2", "lfm2", "lfm2-moe", "jamba")
SIZES: dict[str, Any] = dict(max_num_seqs=8)
# Prompts come in several chunks, and there is room for two of the longest requests.
BUSY: dict[str, Any] = SIZES | dict(max_num_batched_tokens=64, block_size=32, num_gpu_blocks_override=17)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(16)


@pytest.mark.slow  # `make test` has tests/conformance/test_states.py
def test_answers_of_a_gaudi_equal_transformers(tmp_path: Path) -> None:
    check("hpu-emulated", tmp_path, "qwen3-next", "granite4-hybrid", "falcon-h1", "mamba", "lfm2")


class Models:
    """Checkpoints, and what they answer without drafts."""

    def __init__(self, folder: Path, requests: list[Request]) -> None:
        self._folder, self._requests = folder, requests
        self._plain: dict[str, list[list[Answer]]] = {}

    def path(self, case: str) -> str:
        return str(checkpoints.make(case, CASES[case], self._folder))

    def plain(self, case: str) -> list[list[Answer]]:
        if case not in self._plain:
            with engine(self.path(case), **SIZES) as llm:
                self._plain[case] = run_together(llm, self._requests)
        return self._plain[case]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, requests: list[Request]) -> Models:
    return Models(tmp_path_factory.mktemp("recurrent"), requests)


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


def sizes_are_as_reckoned(runner: Any, num_drafts: int) -> None:
    """By `gaudi-spec doctor`, which builds no layer."""
    config = runner.vllm_config
    taken = sum(size for name, size in runner.bytes_beside_kv().items() if "recurrent" in name)
    assert taken == sum(map(size_of, runner.target.states.by_layer.values()))
    rows = SIZES["max_num_seqs"] + 1 + table.num_snapshots(config, None)
    assert taken == state_bytes(config, rows, table.num_pending(num_drafts))
    num_layers = num_layers_with_kv(config.model_config, config.parallel_config)
    assert num_layers == len(runner.target.kv_cache_spec())


@pytest.mark.parametrize(
    ("case", "num_drafts"), [(CASE, 3), *slow((CASE, 1), (CASE, 5), *((case, 3) for case in OTHERS))]
)
def test_drafts_are_lossless(case: str, num_drafts: int, models: Models, requests: list[Request]) -> None:
    """In chunks, preempted, and with every number of drafts accepted; and greedy texts are those of transformers."""
    model, plain = models.path(case), models.plain(case)
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
        sizes_are_as_reckoned(runner, num_drafts)


BEGIN = random_prompts([70], tiny_models.VOCAB, seed=1)[0]
"""Of every prompt: two blocks, and a part of a third."""


@pytest.mark.parametrize(
    ("case", "slots", "options"),
    [
        (CASE, None, dict(block_size=32)),
        *slow((CASE, 2, BUSY | dict(num_gpu_blocks_override=14))),
        *slow(*((case, None, dict(block_size=32)) for case in OTHERS)),
    ],
)
def test_prefix_cache_restores_recurrent_states(
    case: str, slots: int | None, options: dict[str, Any], models: Models
) -> None:
    """The first two prompts compute it; the second leaves a snapshot where both went on otherwise. With two
    slots and little KV states are given away, and requests preempted, while others start from them."""
    prompts = [[*BEGIN, *tail] for tail in random_prompts([30, 33, 58, 26, 3, 90, 41, 17], tiny_models.VOCAB, seed=2)]
    ask: dict[str, Any] = dict(temperature=0, max_tokens=24, ignore_eos=True)
    kept = {"additional_config": {"gaudi_spec": {"state_snapshots": slots}}} if slots else {}
    drafters.play(lambda context, k: [])
    with speculating(models.path(case), custom("Scripted"), **SIZES | options | kept) as llm:
        uncached = generate(llm, prompts, SamplingParams(**ask, skip_reading_prefix_cache=True))
        assert not any(output.num_cached_tokens for output in uncached)
        assert llm.reset_prefix_cache()
        texts = [[Answer(tokens, "", None, None)] for tokens in first_tokens(uncached)]
        drafters.play(nearly_right([Request("", prompt, SamplingParams()) for prompt in prompts], texts))
        outputs = [generate(llm, [prompt], SamplingParams(**ask))[0] for prompt in prompts[:3]]
        # Where a chunk holds 64 tokens, the first prompt leaves a snapshot there too.
        assert [output.num_cached_tokens for output in outputs] == [0, 64 if slots else 0, 64]
        outputs += generate(llm, prompts, SamplingParams(**ask))
        assert first_tokens(outputs) == first_tokens([*uncached[:3], *uncached])
        assert 0 < accepted(llm) < counter(llm, "vllm:spec_decode_num_draft_tokens")
        if slots is None:
            assert min(output.num_cached_tokens for output in outputs[3:]) >= 64
        else:
            assert preemptions(llm) > 0
            assert sum(output.num_cached_tokens > 0 for output in outputs[3:]) > 2


@pytest.mark.slow
def test_drafts_on_the_device_are_lossless(models: Models, requests: list[Request]) -> None:
    """How many drafts were accepted is known on the device alone when the next step is prepared."""
    plain, config = models.plain(CASE), dict(ngram(3, lookup=(1, 3)), method="ngram_gpu")
    with speculating(models.path(CASE), config, async_scheduling=True, **BUSY) as llm:
        check_same(requests, run_together(llm, requests), plain)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 100
