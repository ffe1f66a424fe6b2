"""Suffix decoding compared with a count over all substrings, and what the proposer feeds into a cache."""

import numpy as np
import pytest

from tests.support.reference.suffix import suffix_drafts
from vllm_gaudi_spec.drafting import suffix
from vllm_gaudi_spec.drafting.suffix import Draft, SuffixCache, SuffixProposer, Text
from vllm_gaudi_spec.records import Context

OPTIONS = [(24, 8, 1.0, 0.1), (24, 3, 2.0, 0.5), (6, 8, 1.0, 0.0), (3, 8, 4.0, 0.3), (9, 5, 0.5, 1.0), (1, 4, 1.0, 0.1)]


def texts_of(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    """Return loops with a few changed tokens: matches of all lengths, certain and uncertain."""
    texts = []
    for _ in range(count):
        text = np.resize(rng.integers(0, 4, int(rng.integers(1, 9))), int(rng.integers(1, longest)))
        text[rng.random(text.size) < 0.15] = rng.integers(0, 4)
        texts.append(text.tolist())
    return texts


@pytest.mark.parametrize("options", OPTIONS)
def test_drafts_equal_the_count_over_all_substrings(
    options: tuple[int, int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix, "MAX_OCCURRENCES", 10_000)
    depth, max_drafts, factor, min_prob = options
    rng = np.random.default_rng(depth)
    for _ in range(60):
        cache = SuffixCache(depth, 4)
        past = texts_of(rng, 6, 30)
        for number, response in enumerate(past):
            cache.start_request(f"p{number}", [7, 0])
            cuts = sorted(rng.integers(0, len(response) + 1, 3).tolist())
            for piece in np.split(np.array(response), cuts):
                cache.add_active_response(f"p{number}", piece.tolist())
            cache.stop_request(f"p{number}")
        assert list(cache._cached) == ["p2", "p3", "p4", "p5"]
        (text,) = texts_of(rng, 1, 60)
        cache.start_request("a", np.array(text[:10], dtype=np.int32))
        cache.add_active_response("a", text[10:])
        assert list(cache._active) == ["a"]
        draft = cache.speculate("a", text, max_drafts, factor, min_prob)
        ways = (suffix_drafts(texts, text, depth, max_drafts, factor, min_prob) for texts in ([text], past[2:]))
        expected = [way for each in ways for way in each]
        assert draft.score == pytest.approx(max((score for _, score in expected), default=0.0))
        # Suffixes of different lengths may have equal scores: then either draft is correct.
        best = [ids for ids, score in expected if score == pytest.approx(draft.score)]
        assert not draft.token_ids or draft.token_ids in best


def test_long_text_is_found_after_tables_grow() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.permutation(5000).tolist()
    text = Text(24)
    for piece in np.array_split(tokens, 700):
        text.append(piece)
    assert all(len(heads) >= len(tokens) for heads in text._heads)
    limits = [min(6, m, 24 - m) for m in range(25)]
    for end in rng.integers(24, 4990, 100):
        draft = text.speculate(tokens[end - 24 : end], limits, 0.1, Draft())
        assert draft == Draft(tokens[end : end + 6], 6.0)


def test_old_responses_are_freed_and_others_are_found() -> None:
    cache = SuffixCache(8, 3)
    for number in range(50):
        cache.start_request(str(number), [])
        cache.add_active_response(str(number), list(range(number * 10, number * 10 + 10)))
        cache.stop_request(str(number))
    cache.start_request("a", [])
    for number in range(50):
        draft = cache.speculate("a", [number * 10 + 1, number * 10 + 2], 2)
        assert draft.token_ids == ([number * 10 + 3, number * 10 + 4] if number >= 47 else [])
    past = cache._past
    assert len(past._tokens) < 100
    assert past._dropped > 300
    assert all(len(earlier) == len(past._tokens) for earlier in past._earlier)


def test_no_cached_requests_keeps_no_responses() -> None:
    cache = SuffixCache(8, 0)
    cache.start_request("a", [1, 2])
    cache.add_active_response("a", [3, 4, 5])
    cache.stop_request("a")
    cache.start_request("b", [3, 4])
    assert cache.speculate("b", [3, 4], 4) == Draft()
    assert not cache._cached


@pytest.fixture
def proposer() -> SuffixProposer:
    return SuffixProposer(24, 10, 1.0, 0.1)


def ask(proposer: SuffixProposer, tokens: list[int], num_prompt: int, req_id: str = "a", wanted: int = 4) -> list[int]:
    array = np.array(tokens, dtype=np.int32)
    (drafts,) = proposer.propose([Context(req_id=req_id, tokens_np=array, num_prompt=num_prompt, max_drafts=wanted)])
    array[:] = 77  # the view is only valid during the call
    return list(drafts)


@pytest.mark.parametrize(("tokens", "num_prompt"), [([1, 9, 3, 4], 3), ([1, 2, 3], 3), ([1, 2, 3, 4, 5], 4)])
def test_diverging_text_replaces_previous_one(proposer: SuffixProposer, tokens: list[int], num_prompt: int) -> None:
    ask(proposer, [1, 2, 3, 4, 8, 8], 3)
    assert ask(proposer, tokens, num_prompt) == []
    assert ask(proposer, [*tokens, *tokens], num_prompt, wanted=3) == tokens[:3]


def test_forgotten_request_is_kept_as_past_response(proposer: SuffixProposer) -> None:
    ask(proposer, [1, 2, 3, 4, 5, 6], 3)
    proposer.forget(["a", "never seen"])
    proposer.forget(["a"])
    assert ask(proposer, [9, 9, 4, 5], 2, "b") == [6]
    assert ask(proposer, [9, 2], 1, "c") == []  # prompts are not shared between requests
