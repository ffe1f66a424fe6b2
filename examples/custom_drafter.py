"""Draft from a file of earlier answers with your own drafter class (method `custom_class`).

.venv/bin/python examples/custom_drafter.py

The program records answers without drafts. It then asks different questions about the same subjects and drafts from the
record. To use the class in a server:

ANSWERS=answers.txt PYTHONPATH=examples .venv/bin/vllm serve MODEL --speculative-config \
    '{"method": "custom_class", "model": "custom_drafter.AnswerBook", "num_speculative_tokens": 5}'
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_gaudi_spec.tools.demo_model import demo_model_path

MATCH = 2
RECORDED = ["What is photosynthesis?", "What is the water cycle?", "What is an operating system?"]
ASKED = ["Explain photosynthesis.", "Explain the water cycle.", "Explain what an operating system is."]


class AnswerBook:
    """A drafter that finds the last tokens in a text and drafts the tokens that follow them there."""

    def __init__(self, vllm_config: Any) -> None:
        """Read the text from the file named by the environment variable ANSWERS."""
        num_drafts = vllm_config.speculative_config.num_speculative_tokens
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        tokens = tokenizer.encode(Path(os.environ["ANSWERS"]).read_text(), add_special_tokens=False)
        self.continuations: dict[tuple[int, ...], list[int]] = {}
        for place in range(MATCH, len(tokens)):
            self.continuations[tuple(tokens[place - MATCH : place])] = tokens[place : place + num_drafts]

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the draft tokens for each request. The list is empty for a request without drafts.

        Args:
            sampled_token_ids: The tokens that the last step added to each request.
            num_tokens_no_spec: The number of tokens in each request.
            token_ids_cpu: The tokens of each request, padded to equal length.
            slot_mappings: Always None here.
        """
        ends = [
            tuple(tokens[:length][-MATCH:].tolist())
            for tokens, length in zip(token_ids_cpu, num_tokens_no_spec, strict=True)
        ]
        return [self.continuations.get(end, []) for end in ends]


def answer(
    questions: list[str], speculative_config: dict[str, Any] | None = None
) -> tuple[list[str], dict[str, float]]:
    """Return the answers to the questions, and the engine's counters."""
    llm = LLM(
        model=demo_model_path(),
        speculative_config=speculative_config,
        dtype="float32",
        max_model_len=1024,
        disable_log_stats=False,
    )
    chats: Any = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [output.outputs[0].text for output in outputs], counters


def main() -> None:
    drafter = {"method": "custom_class", "model": "custom_drafter.AnswerBook", "num_speculative_tokens": 5}
    answers, _ = answer(RECORDED + ASKED)
    with TemporaryDirectory() as folder:
        book = Path(folder, "answers.txt")
        book.write_text("\n".join(answers[: len(RECORDED)]))
        os.environ["ANSWERS"] = str(book)
        texts, counters = answer(ASKED, drafter)
    tokens = counters["vllm:generation_tokens"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    equal = sum(map(str.__eq__, texts, answers[len(RECORDED) :]))
    print(f"\n{ASKED[0]}\n  {texts[0]!r}")
    print(f"{tokens:.0f} tokens, {accepted:.0f} of them drafts from the answer book")
    print(f"{equal} of {len(texts)} answers equal those without drafts")


if __name__ == "__main__":
    main()
