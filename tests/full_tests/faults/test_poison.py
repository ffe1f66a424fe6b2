"""What is no number in one request, whatever made it so, reaches no other: not in one batch, and not through what the
request leaves behind in KV blocks, states and rows."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.full_tests import poison
from tests.full_tests.engines import engine
from tests.full_tests.speculation import speculating

# Blocks for few requests, and prompts in chunks.
SIZES: dict[str, Any] = dict(
    max_num_seqs=5, max_model_len=256, max_num_batched_tokens=128, kv_cache_memory_bytes=1 << 20, block_size=32
)
NAN, INF, LARGE = float("nan"), float("-inf"), 3e38
Poisoned = Callable[[str, float], str]
"""Copies a model, with a token whose embedding is that value."""


@pytest.fixture
def poisoned(tmp_path: Path) -> Poisoned:
    def copy(model: str, value: float) -> str:
        folder = shutil.copytree(model, tmp_path / "model")
        poison.poison(folder, value)
        return str(folder)

    return copy


def with_drafts(model: str) -> AbstractContextManager[LLM]:
    """By the same model, which meets the token as well."""
    sizes = SIZES | dict(kv_cache_memory_bytes=2 * SIZES["kv_cache_memory_bytes"])
    return speculating(model, dict(method="draft_model", model=model, num_speculative_tokens=3), **sizes)


def test_nan_of_a_request_reaches_no_other_with_drafts(looping_llama: str, poisoned: Poisoned) -> None:
    with with_drafts(poisoned(looping_llama, NAN)) as llm:
        poison.check(llm)


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, INF, LARGE])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_nan_of_a_request_reaches_no_other(
    value: float, prefix_cache: bool, looping_llama: str, poisoned: Poisoned
) -> None:
    with engine(poisoned(looping_llama, value), enable_prefix_caching=prefix_cache, **SIZES) as llm:
        poison.check(llm)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["falcon-h1", "deepseek-v3"])
def test_nan_in_states_and_latent_kv_reaches_no_other(
    case: str, made: Callable[[str], str], poisoned: Poisoned
) -> None:
    """Falcon-H1 has layers of both kinds, and chunks that start from snapshots."""
    with engine(poisoned(made(case), NAN), **SIZES) as llm:
        poison.check(llm)
