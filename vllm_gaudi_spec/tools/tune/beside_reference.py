"""Our engine on the prompts of a reference: its own output, and its log-likelihoods of the reference's output.

python -m vllm_gaudi_spec.tools.tune.beside_reference TASK.json ANSWER.json
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from vllm_gaudi_spec.tools.tune.child import serve
from vllm_gaudi_spec.tools.tune.options import engine_options

TIE = 1e-3
"""Where the reference preferred its token by less, another one is no mistake: kernels round differently."""


@dataclass(frozen=True)
class Difference:
    prompt: int
    position: int
    """Of the first token of the answer that differs."""
    reference: int
    ours: int
    margin: float
    """By how much the reference preferred its token to the next best, in log-likelihood."""

    @property
    def tied(self) -> bool:
        return self.margin <= TIE


@dataclass(frozen=True)
class Comparison:
    of: int
    differences: tuple[Difference, ...]
    num_scored: int
    """Tokens of prompts and of the reference's answers, whose log-likelihoods were compared."""
    largest: float
    average: float
    """Of the absolute differences of their log-likelihoods."""

    @property
    def equal(self) -> int:
        return self.of - len(self.differences)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"equal": self.equal, "tied": sum(one.tied for one in self.differences)}


def compare(reference: dict[str, Any], ours: dict[str, Any]) -> Comparison:
    pairs = list(zip(reference["answers"], ours["answers"], strict=True))
    differences = [found for number, pair in enumerate(pairs) if (found := _difference(number, *pair))]
    apart = [
        abs(expected - measured)
        for one, other in pairs
        for expected, measured in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    return Comparison(len(pairs), tuple(differences), len(apart), max(apart), mean(apart))


def _difference(prompt: int, reference: dict[str, Any], ours: dict[str, Any]) -> Difference | None:
    pairs = zip(reference["ids"], ours["ids"], strict=True)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        return None
    return Difference(
        prompt, position, reference["ids"][position], ours["ids"][position], reference["margins"][position]
    )


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """`texts`: of each prompt the reference's ids, of prompt and answer."""
    from vllm import SamplingParams

    from vllm_gaudi_spec.tools.tune.case import engine

    texts = task["texts"]
    defaults = dict(
        dtype=task["dtype"],
        max_model_len=max(len(text["prompt_ids"]) + len(text["ids"]) for text in texts) + 1,
        speculative_config=task["speculative"],
    )
    with engine(task["model"], **engine_options(defaults, task["engine"])) as llm:
        generated = llm.generate(
            [{"prompt_token_ids": text["prompt_ids"]} for text in texts],
            SamplingParams(temperature=0.0, max_tokens=len(texts[0]["ids"]), ignore_eos=True),
            use_tqdm=False,
        )
        scored = llm.generate(
            [{"prompt_token_ids": text["prompt_ids"] + text["ids"]} for text in texts],
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
    return {
        "answers": [
            {
                "ids": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
                "logprobs": [
                    of_token[token].logprob
                    for token, of_token in zip(seen.prompt_token_ids[1:], seen.prompt_logprobs[1:], strict=True)
                ],
            }
            for output, seen in zip(generated, scored, strict=True)
        ]
    }


if __name__ == "__main__":
    serve(answer)
