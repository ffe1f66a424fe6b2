"""Attention sinks (gpt-oss) and ALiBi (BLOOM, Falcon): the greedy tokens of transformers, with drafts and without."""

from collections.abc import Callable

import pytest

from tests.full_tests.engines import counter, engine
from tests.full_tests.kv_paths import (
    SIZES,
    K,
    check_without_and_with_drafts,
    texts,
    without_drafts,
)
from tests.full_tests.speculation import accepted

GPT_OSS, MXFP4, BLOOM = "gpt-oss", "gpt-oss-mxfp4", "bloom"


@pytest.mark.parametrize(
    "case", [GPT_OSS, *(pytest.param(case, marks=pytest.mark.slow) for case in (BLOOM, "falcon-alibi", MXFP4))]
)
def test_sinks_and_alibi_equal_transformers(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [GPT_OSS, MXFP4, BLOOM])
def test_sinks_and_alibi_on_two_ranks(case: str, made: Callable[[str], str]) -> None:
    """Each has its own heads' sinks or slopes, and a part of each expert."""
    check_without_and_with_drafts(case, made(case), tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [GPT_OSS, BLOOM])
def test_sinks_and_alibi_with_kv_in_fp8(case: str, made: Callable[[str], str]) -> None:
    check_without_and_with_drafts(case, made(case), kv_cache_dtype="fp8")


# ---- drafters beside gpt-oss -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [GPT_OSS, BLOOM])
def test_drafter_with_sinks_or_alibi(drafter: str, made: Callable[[str], str]) -> None:
    """A drafter keeps all of its KV, whatever the windows of its layers, and has sinks or slopes as a target has. As
    its own drafter a model is right nearly always."""
    drafting = dict(method="draft_model", model=made(drafter), num_speculative_tokens=K)
    with engine(made(GPT_OSS), speculative_config=drafting, **SIZES) as llm:
        plain = without_drafts(llm)
        assert texts(llm) == plain
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        assert drafter != GPT_OSS or accepted(llm) > 0.95 * drafted
