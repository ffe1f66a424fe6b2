"""transformers as the reference: logits and greedy tokens of a checkpoint in float32."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from vllm_gaudi_spec.sampling.noise import Stream, fold_seed, gumbel


class Reference:
    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits_after(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(output), V]: row i is what decides output[i], given the prompt and output[:i]; one forward pass."""
        ids = torch.tensor([[*prompt, *output]])
        return self.model(ids).logits[0, len(prompt) - 1 : -1].float()

    @torch.no_grad()
    def next_logits(self, context: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(context)])).logits[0, -1].float()

    def scores(self, context: list[int], params: SamplingParams) -> torch.Tensor:
        """What candidates are compared by: their logits or, where they are drawn, logit / temperature + noise."""
        logits_V = self.next_logits(context)
        if not params.temperature:
            return logits_V
        assert params.seed is not None
        key, place = torch.tensor([fold_seed(params.seed)], dtype=torch.int32), torch.tensor([[len(context) - 1]])
        noise_V = gumbel(key, place.int(), Stream.TARGET, torch.arange(len(logits_V), dtype=torch.int32))[0, 0]
        return logits_V / params.temperature + noise_V

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """transformers' own generate, which does not stop at the end token here."""
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()
