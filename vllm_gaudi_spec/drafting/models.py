"""Loads drafter models and finds the modules and hidden states that heads share with their target."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import replace

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import UnsupportedConfigError, shown
from vllm_gaudi_spec.methods import METHODS, has_model
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.quantization.models import Quantization
from vllm_gaudi_spec.records import Hidden
from vllm_gaudi_spec.upstream.distributed import get_pcp_group, get_tp_group
from vllm_gaudi_spec.upstream.models import PPMissingLayer, get_eagle3_aux_layers_from_config, supports_eagle3

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from vllm_gaudi_spec.attention.metadata import Inputs
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheSpec


def load_drafter(
    speculation: Speculation, vllm_config: VllmConfig, backend: DeviceBackend, target: LoadedModel
) -> LoadedModel | None:
    """Load the drafter's model, if the method has one. The drafter's layers are added to the target's KV cache."""
    if not has_model(speculation.method):
        return None
    group = _get_drafter_group(vllm_config, target)
    try:
        if METHODS[speculation.method].reads_hidden_states:
            unloaded: list[tuple[str, nn.Module]] = []
            with upstream.list_unloaded_matrices(unloaded):
                head = load_head(speculation.method, _without_stages(vllm_config), backend, target, group)
            own = set(head.model.modules())  # without the modules that were replaced by the target's
            if missing := [name for name, module in unloaded if module in own]:
                raise ValueError(f"it has no weights for {shown(missing)}, or they contain NaN")
            return head
        quantization = Quantization.of_drafter(vllm_config, target.model)
        return LoadedModel(
            make_draft_config(vllm_config), backend, prefix="draft_model", quantization=quantization, group=group
        )
    except UnsupportedConfigError:
        raise
    except Exception as error:
        spec_config = vllm_config.speculative_config
        assert spec_config is not None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedConfigError(
            f"The drafter {spec_config.draft_model_config.model} cannot be loaded: {reason}. Check that its checkpoint "
            "is complete and made for this target, or set another model in --speculative-config."
        ) from error


def _get_drafter_group(vllm_config: VllmConfig, target: LoadedModel) -> GroupCoordinator:
    """Return the group of ranks across which the drafter is sharded.

    The group contains the target's ranks, or only this rank if `draft_tensor_parallel_size` is 1 and each rank runs the
    whole drafter.
    """
    spec_config = vllm_config.speculative_config
    assert spec_config is not None
    if spec_config.draft_parallel_config.tensor_parallel_size == target.group.world_size:
        return target.group
    this_rank = get_pcp_group()  # context parallelism is not supported, so this group has one rank
    assert this_rank.world_size == 1
    return this_rank


def _without_stages(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of the configuration that makes vLLM's head classes use layer names that no target layer has.

    A head's first layer is numbered after the target's layers, but vLLM counts only those of this pipeline stage.
    """
    config = copy(vllm_config)
    config.parallel_config = copy(vllm_config.parallel_config)
    config.parallel_config.pipeline_parallel_size = 1
    return config


def make_draft_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return vLLM's configuration for the drafter's model."""
    spec_config = vllm_config.speculative_config
    assert spec_config is not None
    parallel = replace(spec_config.draft_parallel_config, rank=vllm_config.parallel_config.rank)
    draft_vllm_config = replace(
        vllm_config,
        quant_config=None,  # read from the drafter's checkpoint
        model_config=spec_config.draft_model_config,
        parallel_config=parallel,
        load_config=spec_config.draft_load_config or vllm_config.load_config,
    )
    return spec_config.apply_draft_overrides(draft_vllm_config)


def get_kv_specs_in_target(speculation: Speculation | None, drafter: LoadedModel | None) -> dict[str, KVCacheSpec]:
    """Return the KV specs of drafter layers with KV in the target's blocks rather than in a `DrafterKVRegion`."""
    if speculation is None or drafter is None or speculation.retokenizes:
        return {}
    # A head never has to catch up, so vLLM may free blocks that are outside its window.
    return drafter.kv_cache_spec() if METHODS[speculation.method].is_head else drafter.drafter_kv_cache_spec()


# --- heads ---


def load_head(
    method: str, vllm_config: VllmConfig, backend: DeviceBackend, target: LoadedModel, group: GroupCoordinator
) -> LoadedModel:
    """Load a draft head.

    vLLM's head classes take the target's configuration, which contains the head's in `speculative_config`.
    """
    spec_config = vllm_config.speculative_config
    assert spec_config is not None
    quantization = Quantization.of_drafter(vllm_config, target.model)
    configs = dict(
        model_config=spec_config.draft_model_config,
        load_config=spec_config.draft_load_config,
        quantization=quantization,
        group=group,
    )
    if group is not target.group:
        target.return_hidden_states()
    row = METHODS[method]
    module, name = row.model_class.split(".")
    head: LoadedModel = getattr(import_module(f"{__package__}.{module}"), name)(
        vllm_config, backend, **configs, target=target
    )
    if not row.is_head:
        return head
    if row.reads_layers and getattr(head.model.model, "use_aux_hidden_state", True):
        _output_layer_states(target, head, spec_config)
    elif hasattr(target.model, "get_mtp_target_hidden_states"):
        raise UnsupportedConfigError(
            f"{type(target.model).__name__} does not return the hidden states of its MTP layer from its forward, which "
            "is not supported; use another method in --speculative-config."
        )
    else:
        target.set_outputs(split_carried)
    return head


class LoadedHead(LoadedModel):
    def __init__(self, *args: Any, target: LoadedModel, **named: Any) -> None:
        named["adapt"] = partial(self._adapt, target)
        super().__init__(*args, **named)
        self.set_outputs(split_carried)
        shares_output = getattr(self.model, "lm_head", None) is _get_output_matrix(target.model)
        self._output_group = target.group if shares_output else self.group
        if (offsets := getattr(self.model, "draft_id_to_target_id", None)) is not None:
            self.output_ids = offsets + torch.arange(len(offsets), device=offsets.device)

    def _adapt(self, target: LoadedModel, head: nn.Module) -> None:
        share_modules(target.model, head, group=target.group)

    def compute_mask_state(self) -> torch.Tensor:
        """Return the learned hidden state that a parallel head uses with mask tokens, [H]."""
        learned = getattr(self.model, "mask_hidden", None)
        if learned is None:
            raise UnsupportedConfigError(
                f"{type(self.model).__name__} does not draft in parallel; leave parallel_drafting out of "
                "--speculative-config."
            )
        with self.counting_rows(torch.ones(1, dtype=torch.bool, device=learned.device)):
            state: torch.Tensor = self.model.combine_hidden_states(learned)
        return state.view(-1)

    def logits(self, hidden: torch.Tensor, adapters_N: torch.Tensor | None = None) -> torch.Tensor:
        assert adapters_N is None, "only the target has adapters"
        with upstream.tensor_parallel_group(self._output_group):
            if self.output_ids is None:
                logits: torch.Tensor = self.model.compute_logits(hidden)
            else:  # `compute_logits` would scatter logits to the target's vocabulary; `ReducedVocabulary` gathers them
                logits = self.model.logits_processor(self.model.lm_head, hidden)
        return logits


def split_carried(output: Any, inputs: Inputs) -> Hidden:
    """Split a head's output, because some heads return one hidden state for logits and another for the next step."""
    return Hidden(*output) if isinstance(output, tuple) else Hidden(output, output)


# --- the target's modules ---


class _InTargetGroup(nn.Module):
    """Runs a module of the target in the target's tensor-parallel group, for a head that is in another group."""

    def __init__(self, part: nn.Module, group: GroupCoordinator) -> None:
        super().__init__()
        self.part = part
        self._group = group

    def forward(self, *args: Any) -> Any:
        with upstream.tensor_parallel_group(self._group):
            return self.part(*args)


def _get_embeddings(target: nn.Module) -> nn.Module | None:
    """Return the embeddings, which gpt-oss stores under another name."""
    text = _get_text_model(target).model
    return getattr(text, "embed_tokens", getattr(text, "embedding", None))


def _get_output_matrix(target: nn.Module) -> nn.Module | None:
    """Return the output matrix, which is the embedding matrix in some targets."""
    return getattr(_get_text_model(target), "lm_head", _get_embeddings(target))


def _get_text_model(target: Any) -> Any:
    """Return the language model of a multimodal model, or the model itself if it is a language model."""
    return target.get_language_model() if hasattr(target, "get_language_model") else target


def share_modules(target: nn.Module, head: Any, group: GroupCoordinator | None = None) -> None:
    """Share the target's embeddings and output matrix with a head whose checkpoint has none or equal copies.

    Args:
        group: The target's ranks. Shared modules run on these ranks, even if each rank has the whole head.
    """
    embeddings = _get_embeddings(target)
    if embeddings is None:
        raise UnsupportedConfigError(
            f"{type(target).__name__} has no embeddings under a name that is supported; use another method in "
            "--speculative-config."
        )
    shared: set[str] = set()
    if _has_no_matrix(head, "has_own_embed_tokens", getattr(head.model, "embed_tokens", None), embeddings):
        if isinstance(embeddings, PPMissingLayer):
            raise UnsupportedConfigError(
                f"The head has no embeddings of its own, and those of {type(target).__name__} are on the first "
                "pipeline stage; use --pipeline-parallel-size 1."
            )
        shared |= {"embed_tokens", "embedding"}
        other_ranks = group is not None and group is not get_tp_group()
        _replace(head.model, "embed_tokens", _InTargetGroup(embeddings, group) if other_ranks else embeddings)
    output = _get_output_matrix(target)
    if _has_no_matrix(head, "has_own_lm_head", getattr(head, "lm_head", None), output):
        shared |= {"lm_head", "head"}
        _replace(head, "lm_head", output)
        for module in head.modules():
            # In DeepSeek models, for example, each layer has its own output head after a norm.
            if hasattr(module, "shared_head"):
                _replace(module.shared_head, "head", output)
    load = head.load_weights  # later updates may contain older copies of the target's matrices
    head.load_weights = lambda new: load(pair for pair in new if not shared.intersection(pair[0].split(".")[-2:-1]))


def _has_no_matrix(head: nn.Module, flag: str, head_module: nn.Module | None, target_module: nn.Module | None) -> bool:
    """Return whether a head has no such matrix or has a copy that equals the target's.

    If the class has the flag, vLLM sets it when the checkpoint contains such a matrix. Step 3.5 has one matrix in each
    MTP layer instead of `head_module`.
    """
    if not getattr(head, flag, False):
        return True
    if head_module is None:
        return False
    ours, others = getattr(head_module, "weight", None), getattr(target_module, "weight", None)
    if ours is None or others is None:  # quantized
        return False
    return ours.shape == others.shape and torch.equal(ours.cpu(), others.cpu())


def _replace(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if hasattr(owner, name):
        delattr(owner, name)
    setattr(owner, name, module)


# --- EAGLE-3 ---


def _output_layer_states(target: LoadedModel, head: LoadedModel, spec_config: SpeculativeConfig) -> None:
    """Make the target return the concatenated hidden states of the layers that the head reads."""
    layers = get_aux_layers(spec_config)
    read = f"layers {shown(list(layers))}" if layers else "its layers"
    unsupported = UnsupportedConfigError(
        f"{type(target.model).__name__} does not return the hidden states of {read}, which the drafter reads; set a "
        "drafter made for this target, or another method, in --speculative-config."
    )
    if not supports_eagle3(target.model):
        raise unsupported
    layers = layers or target.model.get_eagle3_default_aux_hidden_state_layers()
    target.model.set_aux_hidden_state_layers(tuple(layers))

    def combined(output: Any, inputs: Inputs) -> Hidden:
        # A class may inherit the interface without supporting it, and a checkpoint may list layers that do not exist.
        if not isinstance(output, tuple) or len(output[1]) != len(layers):
            raise unsupported
        last, layer_states = output
        with head.counting(inputs):
            return Hidden(last, head.model.combine_hidden_states(torch.cat(layer_states, dim=-1)))

    target.set_outputs(combined, spec_config.draft_model_config.get_hidden_size())


def get_aux_layers(spec_config: SpeculativeConfig) -> Sequence[int] | None:
    """Return the layers listed in the head's configuration, if any."""
    nested = getattr(spec_config.draft_model_config.hf_config, "eagle_config", None) or {}
    return get_eagle3_aux_layers_from_config(spec_config) or nested.get("eagle_aux_hidden_state_layer_ids")
