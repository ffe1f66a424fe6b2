"""Whether an answer keeps what its request asks for, and whether two answers to one request are equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoTokenizer

from tests.full_tests.equality import Tally, first_difference
from tests.full_tests.reference import Reference
from tests.full_tests.structured import KINDS
from vllm_gaudi_spec.sampling.noise import Stream, fold_seed, gumbel

CLOSE = 2e-3
"""How far apart two log-probabilities of one token may be: kernels for one row and for several round differently."""
_LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this."""


@dataclass
class Judge:
    target: str
    eos: int
    max_len: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.target)
        self._reference: Reference | None = None

    # --- one answer ---

    def find_faults(self, body: dict[str, Any], answer: dict[str, Any]) -> list[str]:
        """Return what is wrong with an answer, whatever its tokens are."""
        choices = answer["choices"]
        wrong = [] if len(choices) == body.get("n", 1) else [f"{len(choices)} choices"]
        used = sum(len(choice["token_ids"]) for choice in choices)
        if answer["usage"]["completion_tokens"] != used:
            wrong.append(f"{used} tokens, but usage {answer['usage']}")
        return wrong + [fault for choice in choices for fault in self._faults_of_choice(body, choice)]

    def _faults_of_choice(self, body: dict[str, Any], choice: dict[str, Any]) -> list[str]:
        ids, reason, stopped_by = choice["token_ids"], choice["finish_reason"], choice["stop_reason"]
        least, most = body.get("min_tokens", 0), min(body["max_tokens"], self.max_len - len(choice["prompt_token_ids"]))
        stops, stop_ids = body.get("stop", []), set(body.get("stop_token_ids", ()))
        ends = stop_ids | (set() if body.get("ignore_eos") else {self.eos})
        is_text_shown = not body.get("echo")
        checks = {
            "finish reason": reason in ("stop", "length"),
            "length": (len(ids) == most) if reason == "length" else (least <= len(ids) <= most),
            # The token at which a request ends is its last one, and may come first at min_tokens.
            "a token behind an end token": not ends & set(ids[least:-1]),
            "an end token before min_tokens": not ends & set(ids[: min(least, len(ids))]),
            "tokens that are not allowed": set(ids) <= set(body.get("allowed_token_ids") or ids),
            "a bad word": not any(_contains(ids, self._encode(word)) for word in body.get("bad_words", ())),
            "stop reason": stopped_by is None or stopped_by in (stops if isinstance(stopped_by, str) else stop_ids),
            "logprobs": body.get("logprobs") is None or self._has_logprobs(body, choice),
        }
        if reason == "stop" and stopped_by is None and "structured_outputs" not in body:
            checks["ended without a reason"] = bool(ids) and ids[-1] == self.eos
        if isinstance(stopped_by, str) and is_text_shown:
            includes = bool(body.get("include_stop_str_in_output"))
            checks["stop string"] = (
                choice["text"].endswith(stopped_by) if includes else stopped_by not in choice["text"]
            )
        elif stops and not least and is_text_shown:
            checks["a stop string that did not stop"] = not any(stop in choice["text"] for stop in stops)
        wrong = [name for name, held in checks.items() if not held]
        if reason == "stop" and (constraint := body.get("structured_outputs")):
            [check] = [check for given, check in KINDS.values() if given == constraint]
            try:
                # The text of a prompt that ends within a character is part of the answer's, also in vLLM's own.
                check(self.tokenizer.decode(ids, skip_special_tokens=True))
            except Exception as error:  # parsers of all kinds fail in ways of their own
                wrong.append(f"the constraint: {error!r}")
        return wrong

    def _encode(self, word: str) -> list[int]:
        return list(self.tokenizer.encode(word.lstrip(" "), add_special_tokens=False))

    @staticmethod
    def _has_logprobs(body: dict[str, Any], choice: dict[str, Any]) -> bool:
        prompt = len(choice["prompt_token_ids"]) if body.get("echo") else 0
        return len(choice["logprobs"]["token_logprobs"]) == prompt + len(choice["token_ids"])

    # --- two answers ---

    def compare(self, name: str, body: dict[str, Any], ours: dict[str, Any], reference: dict[str, Any]) -> None:
        """Add the comparison of `ours` with `reference`, an answer without drafts, to the tally."""
        if len(ours["choices"]) != len(reference["choices"]):
            return  # a fault of the answer, which has been found
        for index, (one, other) in enumerate(zip(ours["choices"], reference["choices"], strict=True)):
            label = f"{name} choice {index}"
            differs = [key for key in ("text", "finish_reason", "stop_reason") if one[key] != other[key]]
            if first_difference(one["token_ids"], other["token_ids"]) is not None:
                scores = self._scores_of(body, index, other)
                self.tally.compare(label, one["token_ids"], other["token_ids"], scores)
            elif differs:
                self.tally.different.append(f"{label}: {[(one[key], other[key]) for key in differs]}")
            elif far := _far_logprobs(one, other):
                self.tally.different.append(f"{label}: {far}")
            else:
                self.tally.equal += 1

    def _scores_of(self, body: dict[str, Any], index: int, choice: dict[str, Any]) -> Callable[[int], torch.Tensor]:
        """Return every candidate's score at a position: computed plainly, and without filters, since both candidates
        have passed them."""
        prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
        if self._reference is None:
            self._reference = Reference(self.target)
        reference = self._reference

        def scores_at(position: int) -> torch.Tensor:
            output = torch.tensor(ids[:position], dtype=torch.long)
            logits_V = reference.next_logits([*prompt, *ids[:position]])
            for token, bias in body.get("logit_bias", {}).items():
                logits_V[int(token)] += bias
            counts_V = torch.bincount(output, minlength=len(logits_V))
            seen_V = counts_V + torch.bincount(torch.tensor(prompt), minlength=len(logits_V)) > 0
            penalty = body.get("repetition_penalty", 1.0)
            penalized_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V = torch.where(seen_V, penalized_V, logits_V)
            logits_V -= body.get("frequency_penalty", 0.0) * counts_V
            logits_V -= body.get("presence_penalty", 0.0) * (counts_V > 0)
            if not body["temperature"]:
                return logits_V
            keys = torch.tensor([fold_seed(body["seed"] + index)], dtype=torch.int32)
            places = torch.tensor([[len(prompt) + position - 1]], dtype=torch.int32)
            tokens_V = torch.arange(len(logits_V), dtype=torch.int32)
            noise_V = gumbel(keys, places, Stream.TARGET, tokens_V)[0, 0]
            return logits_V / max(body["temperature"], _LEAST_TEMPERATURE) + noise_V

        return scores_at


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[place : place + len(part)]) == list(part) for place in range(len(ids) - len(part) + 1))


def _far_logprobs(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Describe the first log-probability that is not close to the other one; empty if all are."""
    for (where, score), (_, expected) in zip(_logprobs(one), _logprobs(other), strict=True):
        if (score is None) != (expected is None) or (score is not None and abs(score - expected) > CLOSE):
            return f"{where} is {score} for {expected}"
    return ""


def _logprobs(choice: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Yield every log-probability of a choice. Of the best candidates, of which the last may tie, only the values."""
    found: list[tuple[str, float | None]] = []
    if choice["logprobs"]:
        for place, score in enumerate(choice["logprobs"]["token_logprobs"]):
            found.append((f"token {place}'s log-probability", score))
        for place, best in enumerate(choice["logprobs"]["top_logprobs"] or ()):
            scores = sorted((best or {}).values())
            found += [(f"a best log-probability at {place}", score) for score in scores]
    for place, best in enumerate(choice.get("prompt_logprobs") or ()):
        scores = sorted(entry["logprob"] for entry in (best or {}).values())
        found += [(f"a prompt log-probability at {place}", score) for score in scores]
    return found
