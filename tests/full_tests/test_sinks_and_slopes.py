"""Attention sinks (gpt-oss) and ALiBi (BLOOM, Falcon): the greedy tokens of transformers, with drafts and without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import accepted, ngram
from tests.full_tests.tiny_models import VOCAB
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.config import REQUEST_OPTION

GPT_OSS, MXFP4, BLOOM = "gpt-oss", "gpt-oss-mxfp4", "bloom"

K = 3
NUM_TOKENS = 24
# Few shapes: on an emulated card each is a program.
SIZES: dict[str, Any] = dict(
    max_num_seqs=2, max_model_len=512, max_num_batched_tokens=256, enable_prefix_caching=True, skip_tokenizer_init=True
)


def prompts() -> list[list[int]]:
    """Within a block, over a block's end, and in two chunks of which the second reads the first; the last two share
    it."""
    found = random_prompts([5, 120, 300], VOCAB)
    return [*found, found[-1][:290] + found[0]]


def texts(llm: LLM, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **options)
    asked = prompts()
    found = first_tokens(generate(llm, asked[:-1], params)) + first_tokens(generate(llm, asked[-1:], params))
    assert counter(llm, "vllm:prefix_cache_hits") > 0
    return found


def without_drafts(llm: LLM) -> list[list[int]]:
    return texts(llm, extra_args={REQUEST_OPTION: 0})


def check(case: str, folder: str, found: list[list[int]]) -> None:
    # transformers has no reader of MXFP4 without a GPU: what such weights stand for is beside them.
    plain = Path(folder).parent / "plain"
    reference, tally = Reference(str(plain) if plain.exists() else folder), Tally()
    for prompt, output in zip(prompts(), found, strict=True):
        tally.greedy(f"{case}, prompt of {len(prompt)}", output, reference.logits_after(prompt, output))
    tally.check()


TWO_RANKS = dict(tensor_parallel_size=2)
"""Each has its own heads' sinks or slopes, and a part of each expert."""
CASES = [
    *((case, {}) for case in (BLOOM, "falcon-alibi", MXFP4)),
    *((case, TWO_RANKS) for case in (GPT_OSS, MXFP4, BLOOM)),
    *((case, dict(kv_cache_dtype="fp8")) for case in (GPT_OSS, BLOOM)),
]


@pytest.mark.parametrize(("case", "options"), quick_and_slow([(GPT_OSS, {})], CASES))
def test_sinks_and_alibi_equal_transformers(case: str, options: dict[str, Any], made: Callable[[str], str]) -> None:
    with engine(made(case), speculative_config=ngram(K), **SIZES, **options) as llm:
        plain = without_drafts(llm)
        assert accepted(llm) == 0
        assert llm.reset_prefix_cache()
        assert texts(llm) == plain
        assert accepted(llm) > 0
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
    if "kv_cache_dtype" not in options:  # which rounds
        check(case, made(case), plain)


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
