"""Texts and log-likelihoods of optimum-habana on a Gaudi, of plain transformers elsewhere.

PYTHON -m vllm_gaudi_spec.tools.tune.reference TASK.json ANSWER.json

PYTHON is that of an environment with `requirements/optimum-habana.in`, which has no vLLM: nothing here may need it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from vllm_gaudi_spec.devices import has_card
from vllm_gaudi_spec.tools.tune.child import serve


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding of `tokens` tokens for each prompt, one prompt after the other, past any end token."""
    import torch
    import transformers

    device, library = "cpu", f"transformers {transformers.__version__}"
    more: dict[str, Any] = {}
    if has_card("hpu"):
        library, more = _adapt_to_gaudi()
        device = "hpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(task["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], torch_dtype=getattr(torch, task["dtype"]))
    model = model.eval().to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    answers = []
    with torch.inference_mode():
        for text in task["prompts"]:
            prompt = tokenizer(text, return_tensors="pt")["input_ids"].to(device)
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=task["tokens"],
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                **more,
            )
            num_prompt = prompt.shape[1]
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).cpu()
            token_ids = ids[0].cpu()
            best = logprobs.topk(2).values
            answers.append(
                {
                    "prompt_ids": token_ids[:num_prompt].tolist(),
                    "ids": token_ids[num_prompt:].tolist(),
                    "text": tokenizer.decode(token_ids[num_prompt:]),
                    # Of all tokens but the first, the prompt's included.
                    "logprobs": logprobs.gather(1, token_ids[1:, None])[:, 0].tolist(),
                    # By how much each of the answer's tokens was preferred.
                    "margins": (best[:, 0] - best[:, 1])[num_prompt - 1 :].tolist(),
                }
            )
    return {"library": library, "device": device, "answers": answers}


def _adapt_to_gaudi() -> tuple[str, dict[str, Any]]:
    """optimum-habana's name and version, and what its `generate` takes beside that of transformers."""
    if importlib.util.find_spec("optimum.habana") is None:
        raise ValueError(
            "this Python has a Gaudi but no optimum-habana: name one that has, made from requirements/optimum-habana.in"
        )
    from optimum.habana import __version__
    from optimum.habana.transformers.modeling_utils import adapt_transformers_to_gaudi

    adapt_transformers_to_gaudi()
    return f"optimum-habana {__version__}", {"lazy_mode": True, "hpu_graphs": False}


if __name__ == "__main__":
    serve(answer)
