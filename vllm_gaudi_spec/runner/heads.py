"""Loading heads: what they share with their target, and what they read of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.models.interfaces import supports_eagle3

from vllm_gaudi_spec.config import EAGLE3, MEDUSA, MTP, UnsupportedConfigError
from vllm_gaudi_spec.proposers.base import Hidden
from vllm_gaudi_spec.runner.loaded_model import LoadedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.backends.base import DeviceBackend


def load_head(method: str, vllm_config: VllmConfig, backend: DeviceBackend, target: LoadedModel) -> LoadedModel:
    """vLLM's classes of heads want the target's configuration, and take the rest from its speculative part."""
    given = vllm_config.speculative_config
    assert given is not None
    kind = LoadedMedusa if method == MEDUSA else LoadedHead
    head = kind(
        vllm_config,
        backend,
        model_config=given.draft_model_config,
        load_config=given.draft_load_config,
        adapt=None if method == MEDUSA else partial(_share, target.model, always=method == MTP),
    )
    if method == EAGLE3 and _reads_several_layers(head.model):
        _tell_layers(target, head.model)
    elif method != MEDUSA:
        target.hidden_of = _carried_too
    return head


def head_size(vllm_config: VllmConfig) -> int:
    """Of a head's hidden states."""
    given = vllm_config.speculative_config
    assert given is not None
    size: int = given.draft_model_config.get_hidden_size()
    return size


class LoadedHead(LoadedModel):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.hidden_of = _carried_too
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        self.said: torch.Tensor | None = None
        """The target's ids of what it can say, unless it can say everything."""
        if offsets is not None:
            self.said = offsets + torch.arange(len(offsets), device=offsets.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.said is None:
            return super().logits(hidden)
        # The class would spread them over the target's vocabulary with a scatter; `FewerTokens` gathers.
        logits: torch.Tensor = self.model.logits_processor(self.model.lm_head, hidden)
        return logits.float()


class LoadedMedusa(LoadedModel):
    @property
    def said(self) -> torch.Tensor | None:
        ids: torch.Tensor | None = self.model.token_map
        return ids

    def logits(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """float32 [rows, U] of each head."""
        pairs = zip(self.model(hidden), self.model.lm_heads, strict=True)
        return [self.model.logits_processor(lm_head, states).float() for states, lm_head in pairs]


def _carried_too(output: Any) -> Hidden:
    """Some heads say one thing to the output matrix and carry another to their next step."""
    return Hidden(*output) if isinstance(output, tuple) else Hidden(output, output)


# --- what is the target's ---


def _share(target: nn.Module, head: nn.Module, *, always: bool) -> None:
    """Embeddings and output matrix, where the checkpoint has none of its own, or the same once more."""
    inner, target_inner = head.model, target.model
    if always or _lacks(head, "has_own_embed_tokens", inner, target_inner, "embed_tokens"):
        _replace(inner, "embed_tokens", target_inner.embed_tokens)
    if always or _lacks(head, "has_own_lm_head", head, target, "lm_head"):
        _replace(head, "lm_head", target.lm_head)
        for layer in getattr(inner, "layers", nn.ModuleDict()).values() if always else ():
            # DeepSeek's form: each layer has a head, with a norm before it.
            if hasattr(layer, "shared_head"):
                _replace(layer.shared_head, "head", target.lm_head)


def _lacks(head: nn.Module, flag: str, owner: nn.Module, target_owner: nn.Module, name: str) -> bool:
    if not getattr(head, flag, False):
        return True
    own, theirs = getattr(owner, name).weight, getattr(target_owner, name).weight
    return own.shape == theirs.shape and torch.equal(own.cpu(), theirs.cpu())


def _replace(owner: nn.Module, name: str, module: nn.Module) -> None:
    if hasattr(owner, name):
        delattr(owner, name)
    setattr(owner, name, module)


# --- EAGLE-3 ---


def _reads_several_layers(head: nn.Module) -> bool:
    return bool(head.model.use_aux_hidden_state)


def _tell_layers(target: LoadedModel, head: nn.Module) -> None:
    """Let the target's forward return what the head wants to read of early, middle and late layers, made one."""
    if not supports_eagle3(target.model):
        raise UnsupportedConfigError(
            f"{type(target.model).__name__} does not give out the states of its layers, which an EAGLE-3 head reads; "
            "use another method in --speculative-config."
        )
    layers = _layers_of(head.config) or target.model.get_eagle3_default_aux_hidden_state_layers()
    target.model.set_aux_hidden_state_layers(tuple(layers))

    def combined(output: Any) -> Hidden:
        last, of_layers = output
        return Hidden(last, head.combine_hidden_states(torch.cat(of_layers, dim=-1)))

    target.hidden_of = combined


def _layers_of(config: Any) -> list[int] | None:
    own = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    return own or (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
