"""A draft model that agrees with the target is always right; one that cannot be understood is refused."""

import itertools
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams

from tests.full_tests import tiny_models
from tests.full_tests.engines import counter, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accepted, speculating
from tests.full_tests.test_refusals import refusal
from tests.full_tests.tiny_models import VOCAB
from tests.support.marks import quick_and_slow

STRICT = dict(rejection_sample_method="strict")
COUPLED = STRICT | dict(draft_sample_method="coupled")
PROBABILISTIC = dict(draft_sample_method="probabilistic")
SCHEDULES: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "one by one": dict(async_scheduling=False),
    "chunked, cached, preempted": dict(
        enable_chunked_prefill=True, max_num_batched_tokens=64, kv_cache_memory_bytes=2 << 20, block_size=32
    ),
}


def drafting(model: str, k: int, method: str = "draft_model", **options: Any) -> dict[str, Any]:
    return dict(method=method, model=model, num_speculative_tokens=k, **options)


def name(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def acceptance(llm: LLM) -> float:
    return accepted(llm) / counter(llm, "vllm:spec_decode_num_draft_tokens")


# Each way of drafting in one schedule, and each schedule but the synchronous one; all of them in `make verify`.
ALWAYS_RIGHT: list[tuple[dict[str, Any], str]] = [
    ({}, "chunked, cached, preempted"),
    (dict(max_model_len=100), "overlapping"),  # some rows stop drafting, and some never draft
    (PROBABILISTIC, "overlapping"),
    (COUPLED, "overlapping"),
]
MORE_OF_THEM = [
    (PROBABILISTIC | dict(rejection_sample_method="block"), "overlapping"),
    *itertools.product(({}, PROBABILISTIC), SCHEDULES),
]


@pytest.mark.parametrize(("options", "schedule"), quick_and_slow(ALWAYS_RIGHT, MORE_OF_THEM), ids=name)
def test_drafter_that_is_the_target_is_always_right(options: dict[str, Any], schedule: str, tiny_llama: str) -> None:
    """A position, a slot or a filter that is off by one and it is not: prompts of all lengths, chunked and cached."""
    temperature = 0.9 if "draft_sample_method" in options else 0.0
    prompts = random_prompts([3, 17, 32, 33, 90, 200, 150, 31] * 2, VOCAB)
    params = [
        SamplingParams(temperature=temperature, top_p=0.95, top_k=40, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with speculating(tiny_llama, drafting(tiny_llama, 4, **options), **SCHEDULES[schedule]) as llm:
        outputs = generate(llm, prompts, params)
        generate(llm, prompts, params)  # again, now on a prefix-cache hit
        rate = acceptance(llm)
    # Kernels for one row and for several round differently: now and then a near-tie goes the other way.
    assert rate > 0.98, rate
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)


@pytest.fixture(scope="module")
def bare(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(looping_llama, folder, dirs_exist_ok=True)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return str(folder)


@pytest.fixture(scope="module")
def foreign(bare: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter of a script that the target can only spell byte by byte; the ends of text are called the same."""
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copytree(bare, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.BPE({"日": 0, "本": 1, "日本": 2}, [("日", "本")]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tiny_models.EOS).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("who", "method", "remedy"),
    [
        ("bare", "universal_draft", "Use a model whose folder contains its tokenizer files"),
        ("bare", "draft_model", "Use a model whose folder contains its tokenizer files"),
        ("foreign", "universal_draft", "Use another model in speculative_config"),
        ("stranger", "draft_model", "use method universal_draft"),
    ],
    ids=lambda value: value.partition(" ")[0],
)
def test_drafter_of_an_unreadable_vocabulary_is_refused(
    who: str, method: str, remedy: str, looping_llama: str, request: pytest.FixtureRequest
) -> None:
    config = drafting(request.getfixturevalue(who), 3, method)
    assert remedy in refusal(looping_llama, speculative_config=config)
