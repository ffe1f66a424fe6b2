"""n-gram drafts pay on repetitive prompts: at least half of them are accepted, and a request alone is faster."""

from time import perf_counter
from typing import Any

from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine
from tests.full_tests.repetitive import repetitive_prompts
from tests.full_tests.speculation import ngram

OPTIONS: dict[str, Any] = dict(
    max_model_len=1024,
    max_num_seqs=8,
    kv_cache_memory_bytes=256 << 20,
    enforce_eager=False,
    enable_prefix_caching=False,
)
DRAFTS = ngram(5, lookup=(2, 5))


def run(llm: LLM, prompts: list[str], num_tokens: int, together: bool = False) -> float:
    """Tokens per second."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = perf_counter()
    for batch in [prompts] if together else [[prompt] for prompt in prompts]:
        llm.generate(batch, params, use_tqdm=False)
    return len(prompts) * num_tokens / (perf_counter() - started)


def acceptance_rate(llm: LLM) -> float:
    accepted, drafted = (counter(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("accepted", "draft"))
    return accepted / drafted


def test_half_of_ngram_drafts_are_accepted_on_repetitive_prompts(demo_model: str) -> None:
    prompts = repetitive_prompts()
    assert len(prompts) == 24
    with engine(demo_model, speculative_config=DRAFTS, **OPTIONS) as llm:
        run(llm, prompts[::2], 64, together=True)
        rate = acceptance_rate(llm)
    print(f"acceptance rate {rate:.3f}")
    assert rate >= 0.5
