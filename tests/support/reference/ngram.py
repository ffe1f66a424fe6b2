"""N-gram drafting, one position and one length at a time."""


def ngram_drafts(tokens: list[int], min_ngram: int, max_ngram: int, max_drafts: int) -> list[int]:
    for size in range(max_ngram, min_ngram - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[len(tokens) - size :]:
                text = list(tokens)
                distance = len(tokens) - (begin + size)
                while len(text) < len(tokens) + max_drafts:
                    text.append(text[-distance])
                return text[len(tokens) :]
    return []
