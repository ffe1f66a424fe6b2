"""Suffix decoding by counting every pattern in every text from its first token to its last."""


def next_token(texts: list[list[int]], pattern: list[int]) -> tuple[int, float] | None:
    """Return the most frequent token after the pattern, the most recent one of a tie, and its share."""
    follow = []
    for text in texts:
        for begin in range(len(text) - len(pattern)):
            if text[begin : begin + len(pattern)] == pattern:
                follow.append(text[begin + len(pattern)])
    if not follow:
        return None
    most = max(follow.count(token) for token in follow)
    token = next(token for token in reversed(follow) if follow.count(token) == most)
    return token, most / len(follow)


def suffix_drafts(
    texts: list[list[int]], context: list[int], depth: int, max_drafts: int, factor: float, min_prob: float
) -> list[tuple[list[int], float]]:
    """Return the draft and its score after each suffix of the context."""
    found = []
    for size in range(1, min(len(context), depth) + 1):
        pattern = context[-size:]
        draft: list[int] = []
        prob, score = 1.0, 0.0
        while len(draft) < min(max_drafts, int(factor * size + 1e-6), depth - size):
            best = next_token(texts, pattern + draft)
            if best is None or prob * best[1] < min_prob:
                break
            draft.append(best[0])
            prob *= best[1]
            score += prob
        found.append((draft, score))
    return found
