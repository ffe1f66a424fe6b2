"""Generate with an engine, and record the steps of each answer: their tokens, and how many of these were drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, SamplingParams


@dataclass
class Answer:
    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Number of tokens of each step of the target; the first is the prompt's."""
    histogram: list[int] = field(default_factory=list)
    """How many steps with drafts accepted 0, 1, ... k of them; empty without speculation."""
    num_draft_tokens: int = 0
    at: list[float] = field(default_factory=list)
    """When each step's output was there: seconds after the request."""

    def take(self, completion: CompletionOutput, seconds: float) -> int:
        """Add the output of a step, `seconds` after the request; returns its number of tokens."""
        new = list(completion.token_ids)
        if new:
            self.token_ids += new
            self.sizes.append(len(new))
            self.at.append(seconds)
        if completion.spec_decode_metrics is not None:
            self.histogram = list(completion.spec_decode_metrics.histogram)
            self.num_draft_tokens = completion.spec_decode_metrics.num_draft_tokens
        return len(new)

    def latency(self) -> dict[str, float | None]:
        """In seconds, as vLLM's benchmark names them: to the first token, per token after it, between outputs."""
        first, last, later = self.at[0], self.at[-1], len(self.token_ids) - self.sizes[0]
        gaps = [after - before for before, after in zip(self.at, self.at[1:], strict=False)]
        return {
            "ttft": first,
            "tpot": (last - first) / later if later else None,
            "itl": median(gaps) if gaps else None,
        }

    def steps(self) -> list[tuple[int, int]]:
        """Of each step, its tokens and how many of these were drafts. A step's last token is the target's own, save
        where the answer's end cut it off: what is missing from the engine's count then is the last step's."""
        drafts = [size - 1 for size in self.sizes]
        if drafts:
            drafts[-1] += sum(number * steps for number, steps in enumerate(self.histogram)) - sum(drafts)
        steps = list(zip(self.sizes, drafts, strict=True))
        if any(not 0 <= accepted <= size for size, accepted in steps):
            raise RuntimeError(f"the engine accepted other numbers of drafts than its steps brought: {steps}")
        return steps

    def pieces(self, tokenizer: Any) -> list[str]:
        """What each token added to the text, as vLLM writes it."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request: Any = SimpleNamespace(
            request_id="", sampling_params=self.params, prompt_token_ids=self.prompt_ids, prompt_embeds=None
        )
        text = IncrementalDetokenizer.from_new_request(tokenizer, request)
        pieces = []
        for token in self.token_ids:
            before = len(text.output_text)
            text.update([token], False)
            pieces.append(text.output_text[before:])
        return pieces


def ask(
    llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams], more: Callable[[int], None] | None = None
) -> list[Answer]:
    """`more` is called with the number of new tokens of each step."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    answers, started = {}, time.perf_counter()
    for number, (text, sampling) in enumerate(zip(prompts, params, strict=True)):
        answer = answers[str(number)] = Answer(text, tokenizer.encode(text), sampling)
        sampling.output_kind = RequestOutputKind.DELTA
        engine.add_request(str(number), tokens_input(answer.prompt_ids, prompt=text), sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        seconds = time.perf_counter() - started
        brought = sum(answers[output.request_id].take(output.outputs[0], seconds) for output in outputs)
        if more is not None:
            more(brought)
    return list(answers.values())
