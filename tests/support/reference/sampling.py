"""Slow, obvious versions of what sampling/ does with whole tensors: one row and one position in plain Python."""


def penalize(
    logits: list[float], prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> list[float]:
    result = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * output.count(token) + presence * (token in output)
    return result


def accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """Apply the strict rule: return the target's own tokens up to and including the first that differs from its
    draft."""
    out: list[int] = []
    for index, token in enumerate(sampled):
        out.append(token)
        if index >= len(drafts) or drafts[index] != token:
            break
    return out
