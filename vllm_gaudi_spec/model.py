"""A loaded model, which computes hidden states for a padded batch of tokens and logits for selected rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.attention import latent
from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl, attend_layer
from vllm_gaudi_spec.attention.metadata import NO_MEDIA, Packed
from vllm_gaudi_spec.attention.operations import PLAIN
from vllm_gaudi_spec.config import UnsupportedConfigError, format_size, ranks_in_step
from vllm_gaudi_spec.quantization.models import quantize_kv
from vllm_gaudi_spec.records import Hidden
from vllm_gaudi_spec.recurrent.states import RecurrentStates
from vllm_gaudi_spec.recurrent.table import has_states
from vllm_gaudi_spec.upstream.attention_backend import AttentionType, set_forward_context
from vllm_gaudi_spec.upstream.distributed import get_pcp_group, get_pp_group, get_tp_group
from vllm_gaudi_spec.upstream.kv_cache import (
    AttentionLayerBase,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm_gaudi_spec.upstream.layers import MambaBase
from vllm_gaudi_spec.upstream.models import IntermediateTensors, get_model, requires_raw_input_tokens

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

    from vllm_gaudi_spec.attention.metadata import Inputs, MultimodalInputs
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.quantization.models import Quantization
    from vllm_gaudi_spec.runner.extensions.adapters import Adapters
    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheSpec

logger = init_logger(__name__)

# Maximum number of rows of logits computed at once when the logits of all tokens are measured.
_MEASURED_LOGITS = 64


def _drop_window(spec: KVCacheSpec) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    common = {field.name for field in fields(FullAttentionSpec) if field.init} - {"sliding_window"}
    return FullAttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.name in common})


def _get_window(layer: Any) -> tuple[int | None, int | None]:
    return layer.impl.sliding_window, getattr(layer, "attention_chunk_size", None)


def _replace_layers(model_config: ModelConfig, backend: DeviceBackend) -> None:
    """Make vLLM's model class use our versions of the layers that we replace."""
    upstream.make_mla_layers(latent.LatentAttention)
    upstream.return_attention_outputs(RectangleAttentionImpl, attend_layer)
    upstream.apply_to_models(model_config.architectures)
    if has_states(model_config):  # this import takes a second and is not needed by most models
        importlib.import_module("vllm_gaudi_spec.recurrent.layers")
    if backend.traits.captures and model_config.supports_multimodal_inputs:
        importlib.import_module("vllm_gaudi_spec.attention.encoders")


def join_stage_tensors(output: Any) -> Any:
    """Join the tensors computed by an early pipeline stage into one tensor [T, W]. Return other outputs unchanged."""
    if not isinstance(output, IntermediateTensors):
        return output
    return torch.cat([part_TH for _, part_TH in sorted(output.tensors.items())], dim=1)


def _get_stage_sizes(model: Any, model_config: ModelConfig) -> dict[str, int]:
    empty = model.make_empty_intermediate_tensors(1, model_config.dtype, torch.device("cpu"))
    if any(part_TH.dim() != 2 for part_TH in empty.tensors.values()):
        raise UnsupportedConfigError(
            f"Stages of {model_config.model} exchange several vectors per token in one tensor, which is not supported; "
            "use --pipeline-parallel-size 1."
        )
    return {name: part_TH.shape[1] for name, part_TH in sorted(empty.tensors.items())}


class LoadedModel:
    """A model with its attention layers, KV binding, recurrent states and adapters."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        backend: DeviceBackend,
        prefix: str = "",
        model_config: ModelConfig | None = None,
        load_config: LoadConfig | None = None,
        adapt: Callable[[nn.Module], None] | None = None,
        quantization: Quantization | None = None,
        group: GroupCoordinator | None = None,
    ) -> None:
        """Load a model and prepare it for the device.

        Args:
            model_config: The model's configuration, if it differs from the one in `vllm_config`.
            load_config: The load configuration, if it differs from the one in `vllm_config`.
            adapt: Modifies the model before it is prepared for the device.
            quantization: Quantizes or measures the model after `adapt`.
            group: The ranks across which a drafter is sharded. None for the target, which is sharded across its stage.
        """
        self.model_config = model_config = model_config or vllm_config.model_config
        self.load_config = load_config or vllm_config.load_config
        self.vllm_config = vllm_config
        self._backend = backend
        self.group = group or get_tp_group()
        # A drafter runs on one stage. Context parallelism is refused, so the other group has only this rank.
        self.stages = get_pp_group() if group is None else get_pcp_group()
        self._packs = not backend.traits.captures
        self._is_in_step = ranks_in_step(vllm_config, model_config) > 1
        # A head may run on one rank, but it runs in the forward context of its target, which needs token counts for all
        # of the target's ranks. If these counts are missing, vLLM asks the other ranks for them.
        self._num_in_context = ranks_in_step(vllm_config)
        self._returns_hidden_states = False
        self.output_ids: torch.Tensor | None = None
        """int64: target token IDs for which there are logits, or None if the logits cover the whole vocabulary."""
        self.set_outputs(lambda output, inputs: Hidden(join_stage_tensors(output)))
        _replace_layers(model_config, backend)
        others = set(get_layers_from_vllm_config(vllm_config, AttentionLayerBase))
        with upstream.tensor_parallel_group(self.group), upstream.pipeline_group(self.stages):
            with (
                upstream.device_type_while_loading(self.load_config.device),
                backend.weights.loading(quantization.quant_config) if quantization else nullcontext(),
            ):
                self.model = get_model(
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix, load_config=load_config
                )
            self.stage_sizes = {} if self.stages.world_size == 1 else _get_stage_sizes(self.model, model_config)
            """Maps each tensor that pipeline stages exchange to its number of elements per token."""
            upstream.suppress_tokens_by_bias(self.model, model_config.dtype)
            if adapt is not None:
                adapt(self.model)
            self.measuring = quantization.apply(self.model, backend) if quantization else None
            quantize_kv(vllm_config, backend, model_config.model, others)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        layers = {name: layer for name, layer in layers.items() if name not in others}
        self._recurrent = {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}
        self._layers = {name: layer for name, layer in layers.items() if name not in self._recurrent}
        self._encoding = {
            name: layer
            for name, layer in self._layers.items()
            if getattr(layer, "attn_type", None) == AttentionType.ENCODER_ONLY
        }
        """Layers whose queries also attend to later keys."""
        self._check_layers(model_config)
        self.states: RecurrentStates | None = None
        self.media_SW: torch.Tensor | None = None
        """The rows of the `MediaStore`, or None without a store."""
        self.rotary_offsets_R: torch.Tensor | None = None
        """The table from `Multimodal.rotary_offsets`, or None without a table."""
        self._kv_owners = {
            name: getattr(layer, "kv_sharing_target_layer_name", None) or name for name, layer in self._layers.items()
        }
        """Maps each layer to the layer whose KV it reads: itself or, in a Gemma 4 assistant, a target layer."""
        backend.weights.prepare_model(self.model)
        self._groups: list[list[str]] = []
        self.adapters: Adapters | None = None

    def _check_layers(self, model_config: ModelConfig) -> None:
        for name, layer in self._recurrent.items():
            if not hasattr(layer, "layer_shape"):
                kind = type(layer).__name__
                raise UnsupportedConfigError(
                    f"{name} is a {kind}, whose recurrence is not supported; use another model."
                )
        if not self._encoding:
            return
        name = self.vllm_config.model_config.model
        if model_config.attn_type != AttentionType.ENCODER_ONLY:
            raise UnsupportedConfigError(
                f"{name} has bidirectional attention, which only pooling models support; use --runner pooling, or a "
                "model that generates."
            )
        if len(self._encoding) < len(self._layers) or self._recurrent:
            raise UnsupportedConfigError(
                f"Only some layers of {name} have bidirectional attention, which is not supported; use another model."
            )

    def set_outputs(self, hidden_of: Callable[[Any, Inputs], Hidden], carried_size: int | None = None) -> None:
        """Set how hidden states are extracted from the output of vLLM's model class.

        `carried_size` is the size of the hidden states that a head reads, if they differ from those used for logits.
        """
        self._hidden_of = hidden_of
        self.carried_size = carried_size

    def return_hidden_states(self) -> None:
        """Make all ranks of the model return the hidden states of the same rank.

        Each rank computes its own hidden states, which may differ in their last bits, but drafts must be the same on
        all ranks.
        """
        self._returns_hidden_states = True

    def _broadcast(self, hidden: Hidden) -> Hidden:
        communicator = self.group.device_communicator
        assert communicator is not None
        carried = hidden.last if hidden.carried is None else hidden.carried
        states = communicator.broadcast(carried.contiguous())
        return Hidden(states if carried is hidden.last else hidden.last, None if hidden.carried is None else states)

    def kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache spec of each attention layer, except for layers that read the KV of another layer."""
        specs: dict[str, KVCacheSpec] = {}
        for name, layer in self._layers.items():
            if name in self._encoding:
                continue
            if self._kv_owners[name] != name:
                continue  # vLLM's layer returns a spec anyway
            spec = layer.get_kv_cache_spec(self.vllm_config)
            if not isinstance(spec, AttentionSpec):
                raise UnsupportedConfigError(
                    f"{name} is an attention layer without KV; use a model whose attention layers all keep KV."
                )
            if not isinstance(layer.impl, RectangleAttentionImpl):
                raise UnsupportedConfigError(f"{name} has its own attention kernel; use a model that does not set one.")
            if layer.impl.value_size is None and spec.head_size_v != spec.head_size:
                raise UnsupportedConfigError(f"{name} has values and keys of different sizes; use another model.")
            if (kv_dtype := getattr(layer.impl, "kv_dtype", None)) is not None:
                spec = replace(spec, dtype=kv_dtype)
            specs[name] = layer.get_attn_backend().customize_spec(spec)
        return specs

    def encoder_kv_spec(self, block_size: int) -> dict[str, FullAttentionSpec]:
        """Return the KV specs of layers in which queries also attend to later keys. Decoders have no such layers.

        The KV of such a layer stays in blocks of `block_size` tokens until the layer has computed attention.
        """
        return {
            name: FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                dtype=layer.impl.dtype,
            )
            for name, layer in self._encoding.items()
        }

    def drafter_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache specs of a drafter, without sliding windows.

        vLLM assigns blocks outside a window to other requests without informing the worker. A drafter that catches up
        on earlier tokens would write to these blocks.
        """
        return {name: _drop_window(spec) for name, spec in self.kv_cache_spec().items()}

    @property
    def layer_names(self) -> list[str]:
        """Names of the attention layers, which store KV."""
        return list(self._layers)

    @property
    def reads_slices(self) -> bool:
        """Whether prompt chunks may be split into slices (`vllm_gaudi_spec.slices`). Valid once KV caches are bound."""
        return not self._recurrent and all(layer.impl.reads_slices for layer in self._layers.values())

    @property
    def reads_in_place(self) -> bool:
        """Whether layers can read KV without gathering it first. Valid once KV caches are bound."""
        return all(layer.impl.spec.operations is PLAIN for layer in self._layers.values())

    def bind_kv(self, caches: dict[str, Any], groups: list[list[str]]) -> None:
        """Bind each layer to its own KV cache, or to the cache of the layer whose KV it reads.

        `groups` lists the layers in each KV cache group. A layer without its own KV joins the group of the layer whose
        KV it reads, because it needs the blocks and slots of that group.
        """
        sharing = {name: owner for name, owner in self._kv_owners.items() if name != owner}
        self._groups = [[*names, *(name for name, owner in sharing.items() if owner in names)] for names in groups]
        owners = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        for name, owner in self._kv_owners.items():
            layer = self._layers[name]
            if _get_window(layer) != _get_window(owners[owner]):
                raise RuntimeError(f"{name} reads the KV of {owner}, which has a different window.")
            layer.bind_kv_cache(caches[owner])
            layer.impl.bind(layer, caches[owner], self._backend)

    def state_bytes(self, num_rows: int, num_pending: int) -> int:
        """Return the size in bytes of the recurrent states for `num_rows` requests, or 0 without recurrent layers."""
        return num_rows * sum(layer.layer_shape().num_bytes(num_pending) for layer in self._recurrent.values())

    def make_states(self, num_rows: int, num_snapshots: int, num_pending: int, device: torch.device) -> None:
        """Allocate the states of recurrent layers. This is a no-op for models without such layers.

        Args:
            num_rows: Number of rows, including the pad row. Rows for snapshots follow these rows.
            num_snapshots: Number of snapshots.
            num_pending: Maximum number of tokens per row whose acceptance is undecided at the end of a forward pass.
            device: Device on which to allocate the states.
        """
        if not self._recurrent:
            return
        shapes = [(name, layer.layer_shape()) for name, layer in self._recurrent.items()]
        every = num_rows + num_snapshots
        self.states = RecurrentStates(shapes, num_rows=every, num_pending=num_pending, device=device)
        for name, layer in self._recurrent.items():
            layer.state = self.states.by_layer[name]
        logger.info(
            "Recurrent states of %d layers take %s per request and %s for %d rows and %d snapshots (state_snapshots).",
            len(shapes),
            format_size(self.state_bytes(1, num_pending)),
            format_size(self.state_bytes(every, num_pending)),
            num_rows,
            num_snapshots,
        )

    def check_kv_is_written(self) -> None:
        """Check after warm-up that every layer whose KV is read has written KV.

        If a layer has not, the model generates noise, with and without drafts.
        """
        owners = self._layers.keys() & set(self._kv_owners.values())
        if unwritten := sorted(name for name in owners if not self._layers[name].impl.has_written):
            raise RuntimeError(f"Warm-up wrote no KV for {', '.join(unwritten)}, which attention reads.")

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        """Return hidden states [T, H] and write the KV of all real tokens.

        `carried_TH` contains the target's hidden states that a head reads, or the previous pipeline stage's output.
        """
        # Ranks that run in lockstep compute the same number of tokens, but do not know how many are real elsewhere.
        packs = self._packs and not self._is_in_step
        packed = Packed.from_counts(inputs.num_real_B, inputs.call.num_queries) if packs else None
        hidden = self._run_packed(inputs, carried_TH, packed)
        if inputs.states is not None:
            assert self.states is not None
            self.states.advance(inputs.states)
        return hidden

    def _run_packed(self, inputs: Inputs, carried_TH: torch.Tensor | None, packed: Packed | None) -> Hidden:
        if packed is None:
            return self._run(inputs, carried_TH)
        num_tokens = inputs.token_ids_T.shape[0]
        carried = None if carried_TH is None else carried_TH.index_select(0, packed.index_T)
        hidden = self._run(inputs.pack(packed), carried)
        last = packed.spread(hidden.last, num_tokens)
        if hidden.carried is None or hidden.carried is hidden.last:
            return Hidden(last, None if hidden.carried is None else last)
        return Hidden(last, packed.spread(hidden.carried, num_tokens))

    def _run(self, inputs: Inputs, carried_TH: torch.Tensor | None) -> Hidden:
        metadata, slots = {}, {}
        for names, call, group_slots in zip(self._groups, inputs.calls, inputs.slots, strict=True):
            metadata.update(dict.fromkeys(names, call))
            slots.update(dict.fromkeys(names, group_slots))
        if inputs.states is not None:
            metadata.update(dict.fromkeys(self._recurrent, inputs.states))
        num_tokens = inputs.token_ids_T.shape[0]
        num_ranks = self._num_in_context
        on_each = torch.full((num_ranks,), num_tokens, dtype=torch.int32) if num_ranks > 1 else None
        with (
            upstream.tensor_parallel_group(self.group),
            upstream.pipeline_group(self.stages),
            set_forward_context(metadata, self.vllm_config, num_tokens, on_each, slot_mapping=slots),
        ):
            with self.counting(inputs), self._apply_adapters(inputs.adapters_T):
                hidden = self._hidden_of(self._call(inputs, carried_TH), inputs)
            if self._returns_hidden_states:
                hidden = self._broadcast(hidden)
            if self.measuring is not None and self.measuring.reads_logits:
                # Compute the logits of every real token, because a step computes only some of them.
                parts = hidden.last.split(_MEASURED_LOGITS), inputs.mark_real().split(_MEASURED_LOGITS)
                for states, real in zip(*parts, strict=True):
                    with self.measuring.counting(real):
                        self.logits(states)
            return hidden

    def _call(self, inputs: Inputs, carried_TH: torch.Tensor | None) -> Any:
        """Call vLLM's model class with the arguments that it supports."""
        tokens_T, media = inputs.token_ids_T, inputs.multimodal
        positions = inputs.positions_T if inputs.rotary is None else inputs.rotary
        if inputs.token_types_T is not None:
            return self.model(tokens_T, positions, token_type_ids=inputs.token_types_T)
        if carried_TH is not None and self.stage_sizes:
            return self.model(tokens_T, positions, intermediate_tensors=self._split_stage_tensors(carried_TH))
        if carried_TH is not None:
            layer = {"spec_step_idx": inputs.head_layer} if inputs.head_layer else {}
            return self.model(tokens_T, positions, carried_TH, **layer)
        if media is None or not media.has_embeddings:
            return self.model(tokens_T, positions)
        raw_T = tokens_T if requires_raw_input_tokens(self.model) else None
        embeddings_TH, deeper = self._embed(tokens_T, media)
        if deeper is None:
            return self.model(raw_T, positions, inputs_embeds=embeddings_TH)
        # Call the inner model, because vLLM's outer class would read `deeper` from its own buffers.
        return self.model.language_model.model(
            raw_T, positions, inputs_embeds=embeddings_TH, deepstack_input_embeds=deeper
        )

    def _split_stage_tensors(self, joined_TW: torch.Tensor) -> IntermediateTensors:
        """Undo `join_stage_tensors`. The parts are copies, because layers write to them."""
        parts = joined_TW.split([*self.stage_sizes.values()], dim=1)
        return IntermediateTensors(
            {name: part_TH.contiguous() for name, part_TH in zip(self.stage_sizes, parts, strict=True)}
        )

    def _embed(
        self, tokens_T: torch.Tensor, media: MultimodalInputs
    ) -> tuple[torch.Tensor, IntermediateTensors | None]:
        """Return token embeddings and, with a media store, the embeddings to add after each of the first layers."""
        deeper = None
        if media.embeddings:
            embeddings_TH = self.model.embed_input_ids(
                tokens_T, multimodal_embeddings=media.embeddings, is_multimodal=media.is_media_T
            )
        else:
            embeddings_TH = self.model.embed_input_ids(tokens_T)
        if media.rows_T is not None:
            embeddings_TH, deeper = self._merge_media(embeddings_TH, media.rows_T)
        return embeddings_TH, deeper

    def _merge_media(
        self, text_TH: torch.Tensor, rows_T: torch.Tensor
    ) -> tuple[torch.Tensor, IntermediateTensors | None]:
        """Merge rows of the media store into the text embeddings.

        Also return the embeddings to add after each of the first layers, or None if there are none.

        vLLM's classes use a boolean mask instead, which does not work in graphs because the number of selected tokens
        is not static.
        """
        assert self.media_SW is not None
        is_media_T1 = (rows_T != NO_MEDIA).unsqueeze(1)
        found_TW = self.media_SW.index_select(0, rows_T)
        first_TH, *others = found_TW.split(text_TH.shape[1], dim=1)
        embeddings_TH = torch.where(is_media_T1, first_TH, text_TH)
        if not others:
            return embeddings_TH, None
        zeros_TH = torch.zeros_like(text_TH)
        added = [torch.where(is_media_T1, part_TH, zeros_TH) for part_TH in others]
        return embeddings_TH, IntermediateTensors(
            {f"deepstack_input_embeds_{layer}": part_TH for layer, part_TH in enumerate(added)}
        )

    def counting(self, inputs: Inputs) -> AbstractContextManager[None]:
        """Restrict measurements to the real tokens of a forward pass that runs in this context."""
        return nullcontext() if self.measuring is None else self.measuring.counting(inputs.mark_real())

    def counting_rows(self, is_real_B: torch.Tensor) -> AbstractContextManager[None]:
        """Restrict measurements to the real rows, for layers that drafters call outside a forward pass."""
        return nullcontext() if self.measuring is None else self.measuring.counting(is_real_B)

    def gather_adapters(self, rows_B: torch.Tensor, num_queries: int = 1) -> torch.Tensor | None:
        """Return each row's LoRA adapter slot, int32, repeated `num_queries` times, or None without adapters."""
        return None if self.adapters is None else self.adapters.gather_slots(rows_B, num_queries)

    def _apply_adapters(self, adapters_T: torch.Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.applied(adapters_T)

    def compute_row_logits(
        self, hidden_NH: torch.Tensor, num_real_B: torch.Tensor, adapters_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [N, V] for B rows with Q hidden states each, of which the first `num_real_B` are real."""
        num_positions = hidden_NH.shape[0]
        packed = Packed.from_counts(num_real_B, num_positions // len(num_real_B)) if self._packs else None
        if packed is None:
            return self.logits(hidden_NH, adapters_N)
        if adapters_N is not None:
            adapters_N = adapters_N.index_select(0, packed.index_T)
        return packed.spread(self.logits(hidden_NH.index_select(0, packed.index_T), adapters_N), num_positions)

    def logits(self, hidden: torch.Tensor, adapters_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [rows, V] in the model's dtype or float32.

        `adapters_N` contains the LoRA adapter slot of each row.
        """
        with upstream.tensor_parallel_group(self.group), self._apply_adapters(adapters_N):
            logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits
