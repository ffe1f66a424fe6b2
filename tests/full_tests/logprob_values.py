"""Whether two runs reported the same log-probabilities."""

from tests.full_tests.upstream_reference import Position


def rank_slack(rank: int) -> int:
    """Among the first tokens ranks are exact. Far down hundreds of tokens lie closer together than float32's rounding
    of a logit, so there a rank means a neighborhood."""
    return rank // 50


def compare(name: str, ours: list[Position], theirs: list[Position], close: float) -> list[str]:
    """One line per difference."""
    if len(ours) != len(theirs):
        return [f"{name}: {len(ours)} positions for {len(theirs)}"]
    wrong = []
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if len(one) != len(other):
            wrong.append(f"{name}[{index}]: {len(one)} entries for {len(other)}")
            continue
        # The last of the asked-for tokens may be another one when two of them tie.
        strays = set(one) ^ set(other)
        scores = [(one.get(token) or other[token])[0] for token in strays]
        if scores and max(scores) - min(scores) > close:
            wrong.append(f"{name}[{index}]: other tokens {sorted(strays)}")
        for token in set(one) & set(other):
            (score, rank), (their_score, their_rank) = one[token], other[token]
            if abs(score - their_score) > close or abs(rank - their_rank) > rank_slack(their_rank):
                wrong.append(f"{name}[{index}] token {token}: {one[token]} for {other[token]}")
    return wrong
