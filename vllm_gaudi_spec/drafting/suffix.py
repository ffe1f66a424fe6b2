"""Suffix decoding (arXiv 2411.04975), which proposes the most frequent continuation of the last tokens in the text.

Each suffix of the text is looked up in the text itself and in the responses of finished requests. A path begins after a
suffix of m tokens and repeatedly appends the most frequent next token. It ends when the next token would lower the
probability of the whole path below min_token_prob, when it has max_spec_factor * m tokens, or when suffix and path
together have max_tree_depth tokens. The draft is the path with the largest sum of probabilities, which is its expected
number of accepted tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_gaudi_spec.records import Context

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import DraftingContext

NOTHING = -1
"""A value that is neither a valid position nor a token. It separates responses and replaces erased tokens."""

MAX_OCCURRENCES = 16
"""Maximum number of occurrences of a pattern to compare, newest first. More comparisons would take longer without
raising the acceptance rate."""


class SuffixProposer:
    """Proposes tokens from a suffix cache. The arguments are vLLM's `suffix_decoding_*` options."""

    def __init__(
        self, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self._cache = SuffixCache(max_tree_depth, max_cached_requests)
        self._fed: dict[str, tuple[int, np.ndarray]] = {}
        """Maps each active request to its prompt length and to those of its tokens that are in the cache."""

    @classmethod
    def build(cls, context: DraftingContext) -> SuffixProposer:
        config = context.spec_config
        return cls(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )

    def propose(self, contexts: list[Context]) -> list[Sequence[int]]:
        return [self._draft(context) for context in contexts]

    def forget(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            if self._fed.pop(req_id, None) is not None:
                self._cache.stop_request(req_id)

    @property
    def num_remembered(self) -> int:
        return len(self._fed)

    def _draft(self, context: Context) -> Sequence[int]:
        self._feed(context)
        draft = self._cache.speculate(
            context.req_id,
            _copy_tokens(context.tokens_np[-self.max_tree_depth :]),
            max_spec_tokens=context.max_drafts,
            max_spec_factor=self.max_spec_factor,
            min_token_prob=self.min_token_prob,
        )
        return draft.token_ids

    def _feed(self, context: Context) -> None:
        """Add missing tokens to the cache. A text that does not continue the earlier one replaces it."""
        num_prompt, fed_np = self._fed.get(context.req_id, (context.num_prompt, context.tokens_np[:0]))
        if num_prompt != context.num_prompt or not np.array_equal(context.tokens_np[: fed_np.size], fed_np):
            self.forget([context.req_id])
        tokens_np = _copy_tokens(context.tokens_np)
        if context.req_id not in self._fed:
            fed_np = tokens_np[: context.num_prompt]
            self._cache.start_request(context.req_id, fed_np)
        if tokens_np.size > fed_np.size:
            self._cache.add_active_response(context.req_id, tokens_np[fed_np.size :])
        self._fed[context.req_id] = (context.num_prompt, tokens_np)


def _copy_tokens(tokens_np: np.ndarray) -> np.ndarray:
    """Return a contiguous copy, because the view in the context is valid only during the call."""
    return np.array(tokens_np, dtype=np.int32)


class Draft(NamedTuple):
    token_ids: list[int] = []  # noqa: RUF012  (never changed)
    score: float = 0.0
    """Expected number of accepted tokens: the sum, over all tokens, of the path probability up to the token."""


class SuffixCache:
    """The texts of active requests, and the responses of the last `max_cached_requests` finished requests."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self._active: dict[str, tuple[int, Text]] = {}
        """Maps each active request to the start of its response and to the text of its prompt and response."""
        self._past = Text(max_tree_depth)
        self._cached: dict[str, tuple[int, int]] = {}
        """Maps each finished request to the range of its response in `_past`, oldest first."""

    def start_request(self, req_id: str, prompt_token_ids: Sequence[int] | np.ndarray) -> None:
        """Start a request. If the ID was used before, the earlier response is evicted."""
        if req_id in self._active:
            raise ValueError(f"Request {req_id} is already active.")
        if req_id in self._cached:
            self.evict_cached_response(req_id)
        text = Text(self.max_tree_depth)
        text.append(prompt_token_ids)
        self._active[req_id] = (text.end, text)

    def add_active_response(self, req_id: str, token_ids: Sequence[int] | np.ndarray) -> None:
        self._active[req_id][1].append(token_ids)

    def stop_request(self, req_id: str) -> None:
        begin, text = self._active.pop(req_id)
        if self.max_cached_requests == 0 or text.end == begin:
            return
        while len(self._cached) >= self.max_cached_requests:
            self.evict_cached_response(next(iter(self._cached)))
        start = self._past.end
        self._past.append([*text.since(begin), NOTHING])
        self._cached[req_id] = (start, self._past.end)

    def evict_cached_response(self, req_id: str) -> None:
        self._past.erase(*self._cached.pop(req_id))
        oldest = next(iter(self._cached.values()), None)
        self._past.drop_before(self._past.end if oldest is None else oldest[0])

    def speculate(
        self,
        req_id: str,
        context: Sequence[int] | np.ndarray,
        max_spec_tokens: int,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> Draft:
        pattern = np.asarray(context)[-self.max_tree_depth :].tolist()
        # limits[m]: maximum number of drafts after a match of m tokens.
        limits = [
            # Add a small tolerance so that, despite binary rounding, a factor of 0.1 gives one token for m = 10.
            max(0, min(max_spec_tokens, int(m * max_spec_factor + 1e-6), self.max_tree_depth - m))
            for m in range(len(pattern) + 1)
        ]
        best = self._active[req_id][1].speculate(pattern, limits, min_token_prob, Draft())
        return self._past.speculate(pattern, limits, min_token_prob, best)


class Text:
    """A growing text that can be searched for the continuations of a pattern.

    No suffix tree is stored. The counts that such a tree would contain are computed on demand from the positions at
    which the pattern occurs. To find these positions, hash buckets chain the positions that end with the same 1, 2, 4
    or 8 tokens, newest first. This takes about 40 bytes and a microsecond per token, whereas tree nodes in Python would
    take 1000 bytes.
    """

    def __init__(self, max_depth: int) -> None:
        self._depth = max_depth
        # The text starts with padding that matches no token, so that lookups of earlier tokens need no bounds check.
        self._tokens = array("i", [NOTHING]) * max_depth
        self._dropped = 0
        """Number of tokens dropped from the start of the text. Positions still count these tokens."""
        self._sizes = [size for size in (8, 4, 2, 1) if size < max_depth]
        self._heads = [array("i", [NOTHING]) * 1024 for _ in self._sizes]
        """[size][bucket]: the newest position at which a pattern in the bucket ends, as an index into `_tokens`."""
        self._earlier = [array("i", self._tokens) for _ in self._sizes]
        """[size][position]: the previous position in the same bucket."""

    @property
    def end(self) -> int:
        return self._dropped + len(self._tokens)

    def since(self, position: int) -> list[int]:
        return self._tokens[position - self._dropped :].tolist()

    def append(self, token_ids: Sequence[int] | np.ndarray) -> None:
        begin = len(self._tokens)
        self._tokens.extend(np.asarray(token_ids).tolist())
        for size, earlier, heads in zip(self._sizes, self._earlier, self._heads, strict=True):
            while len(heads) < len(self._tokens):
                # Both halves of a split bucket keep the old chain with both halves' positions; matches are verified.
                heads *= 2
            mask = len(heads) - 1
            tokens = self._tokens[begin + 1 - size :].tolist()
            ngrams = zip(*(tokens[i:] for i in range(size)), strict=False)
            for index, key in enumerate(map(hash, ngrams), begin):
                earlier.append(heads[key & mask])
                heads[key & mask] = index

    def erase(self, begin: int, end: int) -> None:
        """Replace the tokens in a range so that searches no longer find them."""
        self._tokens[begin - self._dropped : end - self._dropped] = array("i", [NOTHING]) * (end - begin)

    def drop_before(self, position: int) -> None:
        """Free erased tokens before a position. Only large ranges are freed, because freeing moves all other tokens."""
        count = position - self._dropped - self._depth
        if count <= len(self._tokens) // 2:
            return
        for links in (*self._earlier, *self._heads):
            links_np = np.frombuffer(links, dtype=np.int32)
            np.maximum(links_np - count, NOTHING, out=links_np)
        self._tokens = self._tokens[count:]
        self._earlier = [earlier[count:] for earlier in self._earlier]
        self._dropped += count

    def speculate(self, pattern: list[int], limits: list[int], min_prob: float, best: Draft) -> Draft:
        """Return the best draft after any suffix of the pattern, or `best` if no suffix has a better one.

        `limits[m]` is the maximum number of drafts after a suffix of m tokens.
        """
        above = len(limits)
        for index, size in enumerate(self._sizes):
            # The score of a draft cannot exceed its length, so most searches end after the first size.
            limit = max(limits[size:above], default=0)
            if limit > best.score:
                matches = self._find_matches(index, pattern, above - 1, limit)
                best = self._choose_draft(matches, size, limits, min_prob, best)
            above = size
        return best

    def _find_matches(self, index: int, pattern: list[int], longest: int, limit: int) -> list[Match]:
        """Return occurrences of at least the last `size` tokens of the pattern, newest first.

        Occurrences with the same surrounding tokens are merged into one match with a count.
        """
        size, earlier, heads, depth = self._sizes[index], self._earlier[index], self._heads[index], self._depth
        position = heads[hash(tuple(pattern[-size:])) & (len(heads) - 1)]
        windows: dict[bytes, int] = {}
        for _ in range(MAX_OCCURRENCES):
            if position == NOTHING:
                break
            window = self._tokens[position + 1 - depth : position + 1 + limit].tobytes()
            windows[window] = windows.get(window, 0) + 1
            position = earlier[position]
        matches = []
        backwards = pattern[::-1]
        for window, count in windows.items():
            tokens = array("i", window).tolist()
            m = 0
            for token, expected in zip(reversed(tokens[:depth]), backwards, strict=False):
                if token != expected or m == longest:
                    break
                m += 1
            if m >= size:
                # Fewer than `limit` tokens may follow before the text ends.
                matches.append(Match(m, count, [*tokens[depth:], *[NOTHING] * (depth + limit - len(tokens))]))
        return matches

    def _choose_draft(self, matches: list[Match], size: int, limits: list[int], min_prob: float, best: Draft) -> Draft:
        """Return the best draft for all suffix lengths that occur in the matches.

        A match of m tokens is also a match for every shorter suffix.
        """
        sizes = sorted({size - 1, *(match.size for match in matches)})
        # All sizes between two neighboring match lengths have the same matches, so only the highest limit is needed.
        bounds = [(max(limits[low + 1 : high + 1]), high) for low, high in pairwise(sizes)]
        for limit, high in sorted(bounds, reverse=True):
            if limit > best.score:
                paths = [(match.num_positions, match.follow) for match in matches if match.size >= high]
                best = max(best, _follow_most_frequent(paths, limit, min_prob), key=lambda draft: draft.score)
        return best


class Match(NamedTuple):
    size: int
    """Number of matching tokens at the end of the pattern."""
    num_positions: int
    """Number of occurrences of the match and the tokens after it."""
    follow: list[int]
    """The tokens after the match, padded with NOTHING."""


def _follow_most_frequent(paths: list[tuple[int, list[int]]], limit: int, min_prob: float) -> Draft:
    """Return the most frequent path. `paths` contains the number of occurrences of each path and its tokens."""
    token_ids: list[int] = []
    prob, score = 1.0, 0.0
    for i in range(limit):
        counts: dict[int, int] = {}
        for count, tokens in paths:
            counts[tokens[i]] = counts.get(tokens[i], 0) + count
        # The end of a text or response provides no information about the next token.
        counts.pop(NOTHING, None)
        if not counts:
            break
        # The newest path wins ties, because newer paths come first and `max` returns the first maximum.
        token = max(counts, key=counts.__getitem__)
        prob *= counts[token] / sum(counts.values())
        if prob < min_prob:
            break
        token_ids.append(token)
        score += prob
        paths = [(count, tokens) for count, tokens in paths if tokens[i] == token]
    return Draft(token_ids, score)
