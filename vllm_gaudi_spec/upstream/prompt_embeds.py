"""Prompt embeddings are checked where a request comes in, and hashed as what the model reads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch

from vllm_gaudi_spec.upstream.patching import wrap

# Sums of the squares of much larger numbers overflow, as do those of layer norms.
_LARGEST_EMBEDDING = 1e15


def refuse_bad_embeds() -> None:
    """Refuse prompt embeddings that no model could take, and what is no number in them.

    Reason: upstream checks their width and dtype in a server's completions and chats, and nothing of a tensor that is
    passed to `LLM`: one of another width ends the engine. Nor does it look for what is no number. Its hashes of
    prompts are of the embeddings' bytes, whatever their dtype and whichever of them a token is read for.
    Remove when: upstream's `BaseRenderer._process_embeds` refuses these.
    """
    from vllm.renderers.base import BaseRenderer

    wrap(BaseRenderer, "_process_embeds", _refuse_bad_embeds)


def _refuse_bad_embeds(original: Callable[..., Any], renderer: Any, prompt: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    made = original(renderer, prompt)
    if reason := _fault_of(made, renderer):
        raise VLLMValidationError(f"prompt_embeds {reason}.", parameter="prompt_embeds")
    made["prompt_embeds"] = _hashed_apart(made, renderer.model_config.dtype)
    return made


def _hashed_apart(prompt: Any, dtype: torch.dtype) -> torch.Tensor:
    """The embeddings in the model's dtype, infinite where a token is read instead, which nobody can send: the
    prefix cache's hashes are of bytes alone."""
    embeds_LH, are_tokens = prompt["prompt_embeds"].to(dtype), prompt.get("is_token_ids")
    if are_tokens is None:
        return embeds_LH
    return embeds_LH.masked_fill(torch.tensor(are_tokens)[:, None], torch.inf)


def _fault_of(prompt: Any, renderer: Any) -> str | None:
    embeds_LH, tokens, are_tokens = (prompt.get(name) for name in ("prompt_embeds", "prompt_token_ids", "is_token_ids"))
    width = renderer.model_config.get_inputs_embeds_size()
    if embeds_LH.shape[1] != width:
        return f"are {embeds_LH.shape[1]} numbers wide, where the model has {width}"
    if not embeds_LH.is_floating_point():
        return f"are of {embeds_LH.dtype}, which is not a floating-point type"
    if embeds_LH.layout != torch.strided or embeds_LH.device.type != "cpu":
        return f"are {embeds_LH.layout} on {embeds_LH.device}, and have to be a dense tensor of the CPU"
    largest = min(_LARGEST_EMBEDDING, torch.finfo(renderer.model_config.dtype).max)
    if not (embeds_LH.float().abs() <= largest).all():
        return f"have a number beyond {largest:.0e}, or not finite"
    if tokens is None:
        return None if are_tokens is None else "come with prompt_is_token_ids, and without prompt_token_ids"
    if len(tokens) != len(embeds_LH) or len(are_tokens or tokens) != len(tokens):
        return f"are {len(embeds_LH)}, which is not the length of prompt_token_ids or prompt_is_token_ids"
    renderer.validate_token_ids(tokens if are_tokens is None else list(compress(tokens, are_tokens)))
    return None
