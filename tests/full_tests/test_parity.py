"""The demo model: its greedy tokens equal those of transformers in float32, and n-grams foresee repetitive ones."""

from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.reference import Reference
from tests.full_tests.repetitive import repetitive_prompts
from tests.full_tests.speculation import accepted, ngram


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def test_demo_model_equals_transformers(demo_model: str) -> None:
    """20 prompts x 64 tokens. Each token is held against transformers' logits after all tokens before it, which is what
    transformers' greedy loop would have seen, at the price of one forward pass per prompt."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert len(prompts) == 20
    with engine(demo_model, kv_cache_memory_bytes=256 << 20) as llm:
        outputs = first_tokens(generate(llm, prompts, greedy(64)))
    reference, tally = Reference(demo_model), Tally()
    for text, prompt, output in zip(PROMPTS, prompts, outputs, strict=False):
        assert len(output) == 64
        tally.greedy(text[:30], output, reference.logits_after(prompt, output))
    # One prompt through transformers' own loop, so that the short cut above is not taken on trust.
    logits = reference.logits_after(prompts[0], outputs[0])
    tally.compare("generate", outputs[0], reference.greedy(prompts[0], 64), logits.__getitem__)
    tally.check()


def test_half_of_ngram_drafts_are_accepted_on_repetitive_prompts(demo_model: str) -> None:
    prompts, params = repetitive_prompts(), greedy(64)
    assert len(prompts) == 24
    options = dict(max_model_len=1024, max_num_seqs=8, enforce_eager=False, enable_prefix_caching=False)
    drafts = ngram(5, lookup=(2, 5))
    with engine(demo_model, speculative_config=drafts, kv_cache_memory_bytes=256 << 20, **options) as llm:
        llm.generate(prompts[::2], params, use_tqdm=False)
        rate = accepted(llm) / counter(llm, "vllm:spec_decode_num_draft_tokens")
    print(f"acceptance rate {rate:.3f}")
    assert rate >= 0.5
