"""The same pair and prompts in transformers' own assisted generation: a reference from outside.

Greedy requests take its AssistedCandidateGeneratorDifferentTokenizers, which writes the drafter's text anew in the
target's tokens; sampled ones its UniversalSpeculativeDecodingGenerator, which drafts only tokens of both.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator


class Matches:
    """How many drafts were accepted at each step, and how many steps there were."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.accepted: list[int] = []
        self.steps = 0
        target.register_forward_hook(self._forward)
        update = AssistedCandidateGenerator.update_candidate_strategy

        def watched(generator: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
            self.accepted.append(int(num_matches))
            update(generator, input_ids, scores, num_matches)

        AssistedCandidateGenerator.update_candidate_strategy = watched

    def _forward(self, *_: Any) -> None:
        self.steps += 1

    def take(self, tokens: int) -> dict[str, Any]:
        """Of one request. Its first step, which reads the prompt, verifies drafts as well, so its token counts."""
        taken = {"tokens": tokens, "steps": self.steps, "accepted": self.accepted}
        self.accepted, self.steps = [], 0
        return taken


def load(path: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0, top_k=None, top_p=None, do_sample=False)
    return model


def order_vocabulary(tokenizer: Any) -> None:
    """transformers 5.19 prunes the assistant's output matrix in the order of `get_vocab`, and reads its logits in the
    order of ids (AssistantToTargetTranslator.get_target_logits). Out of order, the distribution of a draft is that of
    other tokens: too many are accepted, and the target's distribution is lost.
    """
    ordered = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    tokenizer.get_vocab = lambda: ordered


class Assisted:
    """A target with an assistant of another tokenizer."""

    def __init__(self, target: str, drafter: str) -> None:
        self.target, self.drafter = load(target), load(drafter)
        self.tokenizers = {
            "tokenizer": AutoTokenizer.from_pretrained(target),
            "assistant_tokenizer": AutoTokenizer.from_pretrained(drafter),
        }
        order_vocabulary(self.tokenizers["assistant_tokenizer"])
        self.matches = Matches(self.target)

    @torch.inference_mode()
    def ask(self, prompts: list[list[int]], temperature: float, tokens: int, num_drafts: int) -> dict[str, Any]:
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0}
        self.drafter.generation_config.update(
            num_assistant_tokens=num_drafts,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        requests = []
        for index, prompt in enumerate(prompts):
            torch.manual_seed(1000 * num_drafts + index)
            ids = torch.tensor([prompt])
            made = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=self.drafter,
                max_new_tokens=tokens,
                **self.tokenizers,
                **how,
            )
            requests.append(self.matches.take(made.shape[1] - ids.shape[1]))
        return {"requests": requests}
