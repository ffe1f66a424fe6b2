"""The long-lived parts of the model runner: models, request state, and the objects that compute a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.config import LM_HEAD_QUANTIZATION, Options, Speculation, ranks_in_step
from vllm_gaudi_spec.drafting.base import Drafting, DraftingContext
from vllm_gaudi_spec.drafting.load import load_drafting
from vllm_gaudi_spec.drafting.memory import compute_drafting_bytes, get_kv_block
from vllm_gaudi_spec.drafting.models import get_kv_specs_in_target, load_drafter
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.quantization.models import Quantization
from vllm_gaudi_spec.quantization.output_matrices import quantize_output_matrices
from vllm_gaudi_spec.recurrent.table import describe_snapshots, describe_states, num_pending, num_snapshots
from vllm_gaudi_spec.runner.device_step import DeviceStep
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.runner.extensions.adapters import Adapters
from vllm_gaudi_spec.runner.extensions.custom_processors import CustomProcessors
from vllm_gaudi_spec.runner.extensions.data_parallel import DataParallelLockstep
from vllm_gaudi_spec.runner.extensions.encoders import Encoders
from vllm_gaudi_spec.runner.extensions.kv_connector import KVConnector
from vllm_gaudi_spec.runner.extensions.media_store import MediaStore
from vllm_gaudi_spec.runner.extensions.multimodal import Multimodal
from vllm_gaudi_spec.runner.extensions.pooling import Pooling, get_output_format
from vllm_gaudi_spec.runner.extensions.prompt_logprobs import PromptLogprobs
from vllm_gaudi_spec.runner.extensions.snapshots import SnapshotRows
from vllm_gaudi_spec.runner.extensions.stage_input import StageInput
from vllm_gaudi_spec.runner.kv_cache import KVCache, single_forward_config
from vllm_gaudi_spec.runner.report import Downloads, Reports
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.residence import Residence
from vllm_gaudi_spec.runner.row_memory import count_row_bytes, get_history_len, make_hidden_states
from vllm_gaudi_spec.runner.shapes import SampleShapes, Shapes
from vllm_gaudi_spec.sampling.params import Sampling
from vllm_gaudi_spec.sampling.thinking import ThinkingMarkers
from vllm_gaudi_spec.sampling.verify import Verifier, choose_rule, needs_rectangle

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheSpec


class RunnerParts:
    """Loads the models and creates everything that steps use."""

    samples = True
    """Whether this pipeline stage samples tokens, as the last one does if the model generates."""

    def __init__(self, vllm_config: VllmConfig, backend: DeviceBackend, *, shows_progress: bool) -> None:
        self.vllm_config = vllm_config
        self.backend = backend
        self.options = Options.from_vllm(vllm_config)
        self.shows_progress = shows_progress
        self.recorder = StepRecorder()
        self.max_rows = vllm_config.scheduler_config.max_num_seqs
        self.speculation = Speculation.from_vllm(vllm_config)
        self.num_drafts = self.speculation.num_drafts if self.speculation else 0
        self.widths = self.speculation.widths if self.speculation else ()
        self.num_snapshots = num_snapshots(vllm_config, self.options.state_snapshots)
        self.async_scheduling = vllm_config.scheduler_config.async_scheduling
        self.extensions: list[Extension] = []

    def load_model(self) -> None:
        self.drafter: LoadedModel | None = None
        quantization = Quantization.of_target(self.vllm_config)
        self.target = LoadedModel(self.vllm_config, self.backend, quantization=quantization)
        if self.speculation is not None:
            self.drafter = load_drafter(self.speculation, self.vllm_config, self.backend, self.target)
            if self.drafter and getattr(self.vllm_config.speculative_config, LM_HEAD_QUANTIZATION, None):
                quantize_output_matrices(self.drafter.model, self.backend.weights, self.drafter.model_config.model)
        self.encoders: Encoders | None = None
        if self.vllm_config.model_config.supports_multimodal_inputs and self.backend.traits.captures:
            self.encoders = Encoders(self.vllm_config, self.target.model)
        if self.vllm_config.lora_config is not None:  # last, because a head shares layers without adapters
            self.target.adapters = Adapters(self.vllm_config, self.target.model, self.backend)
        self.residence = Residence(self.backend, self.target, self.drafter)

    def save_measurements(self) -> None:
        """Save the quantization measurements collected so far."""
        for loaded in (self.target, self.drafter):
            if loaded is not None and loaded.measuring is not None:
                loaded.measuring.write()

    def bytes_beside_kv(self) -> dict[str, int]:
        """Return the device memory needed in addition to weights and the KV cache, by purpose."""
        speculation, vocab_size = self.speculation, self.model_config.get_vocab_size()
        shapes = Shapes.from_config(self.vllm_config, self.options, self.backend, self.widths)
        output_format = get_output_format(self.target.model, self.model_config)
        taken = count_row_bytes(self.vllm_config, shapes, self.num_drafts, output_format, self.target.carried_size)
        if num_bytes := self.target.state_bytes(self.max_rows + 1, num_pending(self.num_drafts)):
            taken[describe_states(self.max_rows)] = num_bytes
        if num_bytes := self.target.state_bytes(self.num_snapshots, num_pending(self.num_drafts)):
            taken[describe_snapshots(self.num_snapshots)] = num_bytes
        if self.encoders is not None:
            taken["outputs of image encoders"] = self.encoders.num_bytes
        if self.drafter is None or speculation is None:
            return taken
        kv_region_block = get_kv_block(self.drafter.kv_cache_spec()) if speculation.retokenizes else None
        return taken | compute_drafting_bytes(speculation, self.max_rows, vocab_size, kv_region_block)

    def kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.target.kv_cache_spec() | get_kv_specs_in_target(self.speculation, self.drafter)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *, profiled_blocks: int | None = None) -> None:
        """Create everything that depends on the KV cache.

        A profile run passes `profiled_blocks`, the number of blocks from which sizes are derived, and does not create
        host drafters or user-defined logits processors.
        """
        self._make_kv_cache(kv_cache_config, profiled_blocks)
        self.custom: CustomProcessors | None = None
        if profiled_blocks is None:
            self.custom = CustomProcessors.load(self.vllm_config, self.device, self.max_rows)
        self._make_sampling()
        self._make_extensions()
        self.drafting = self._make_drafting(is_profile=profiled_blocks is not None)
        verifier = Verifier(
            self.requests,
            choose_rule(self.speculation, self.backend),
            self.backend.rules,
            self.model_config.logprobs_mode,
            self.custom,
            ThinkingMarkers.from_vllm(self.vllm_config),
        )
        self.device_step = DeviceStep(
            target=self.target,
            requests=self.requests,
            hidden_states=self.hidden_states,
            sampling=self.sampling,
            verifier=verifier,
            drafting=self.drafting,
            slices=self.shapes.slice_tokens > 0,
        )

    def _make_kv_cache(self, kv_cache_config: KVCacheConfig, profiled_blocks: int | None) -> None:
        """Create the KV cache, the list of shapes, and the request rows."""
        if encodes := self.target.encoder_kv_spec(self.backend.traits.block_size):
            shapes = Shapes.from_config(self.vllm_config, self.options, self.backend)
            max_rows = max(shapes.most_rows, *shapes.prefill_rows)
            kv_cache_config = single_forward_config(encodes, max_tokens=shapes.largest_prefill, max_rows=max_rows)
        self.kv_cache = KVCache(kv_cache_config, self.vllm_config, self.backend)
        device = self.backend.traits.torch_device
        self.target.bind_kv(self.kv_cache.by_layer, self.kv_cache.layer_groups)
        self.target.make_states(self.max_rows + 1, self.num_snapshots, num_pending(self.num_drafts), device)
        # If a drafter has its own positions, its KV is bound by `DrafterKVRegion`.
        drafter = None if self.speculation and self.speculation.retokenizes else self.drafter
        if drafter is not None:
            drafter.bind_kv(self.kv_cache.by_layer, self.kv_cache.layer_groups)
        bound = [model for model in (self.target, drafter) if model is not None]
        self.shapes = Shapes.from_config(
            self.vllm_config,
            self.options,
            self.backend,
            self.widths,
            block_size=min(self.kv_cache.block_sizes, default=None),
            num_blocks=profiled_blocks or self.kv_cache.num_blocks,
            slices_chunks=all(model.reads_slices for model in bound),
            in_place=profiled_blocks is None and self._reads_in_place(bound),
        )
        self.requests = Requests(
            self.backend,
            max_rows=self.max_rows,
            max_len=get_history_len(self.shapes, self.num_drafts),
            block_sizes=self.kv_cache.block_sizes,
            windows=self.kv_cache.windows,
            in_flight=3 * (1 + self.num_drafts),
            max_context=self.shapes.max_context,
            seed=self.model_config.seed,
            keeps_kv=not encodes,
        )
        self.hidden_states = make_hidden_states(
            self.max_rows,
            self.shapes,
            self.num_drafts,
            get_output_format(self.target.model, self.model_config),
            self.target.carried_size,
            device,
        )

    def _reads_in_place(self, models: list[LoadedModel]) -> bool:
        """Whether decodes may read KV blocks in place.

        Without a prefix cache, a block belongs to one request at most, and the scheduler assigns the first free block.
        If there are several KV cache groups, they share the blocks, so each group would also read the others' blocks.
        """
        return (
            self.backend.traits.flat_decode
            and not self.vllm_config.cache_config.enable_prefix_caching
            and len(self.kv_cache.block_sizes) == 1
            and self.kv_cache.keeps_blocks
            and ranks_in_step(self.vllm_config) == 1
            and all(model.reads_in_place for model in models)
        )

    def _make_extensions(self) -> None:
        """Create the extensions that this model and these options need, in the order in which steps call them."""
        model_config, target = self.model_config, self.target
        found: list[Extension | None] = []
        self.pooling: Pooling | None = None
        if model_config.runner_type == "pooling":
            self.pooling = Pooling(target.model, self.hidden_states, self.backend.memory)
        else:
            chunk_TH = self.hidden_states.chunk_TH
            found.append(PromptLogprobs(target, chunk_TH, self.sampling, self.backend, self._downloads, self.recorder))
        if model_config.supports_multimodal_inputs:
            store = None if self.encoders is None else MediaStore(self.encoders, self.backend, self.recorder)
            target.media_SW = None if store is None else store.rows_SW
            multimodal = Multimodal(model_config, target.model, self.backend, self.max_rows, store)
            if multimodal.rotary_offsets is not None:
                target.rotary_offsets_R = multimodal.rotary_offsets.table_RX
            found.append(multimodal)
        if self.num_snapshots and target.states is not None:
            found.append(SnapshotRows(target.states, self.requests, self.backend))
        if ranks_in_step(self.vllm_config) > 1:
            # A step has at most one decode and one chunk per request.
            found.append(DataParallelLockstep(self.shapes, max_forwards=1 + self.max_rows))
        connector = KVConnector.load(self.vllm_config, self.kv_cache, self.speculation, self.drafter)
        found += [target.adapters, self.pooling, self.custom, connector, StageInput.load(target, self.backend)]
        self.extensions = [extension for extension in found if extension is not None]

    def _make_sampling(self) -> None:
        model_config = self.model_config
        rectangles = {random: needs_rectangle(self.speculation, random=random) for random in (False, True)}
        self.sampling = Sampling(
            self.backend,
            max_rows=self.max_rows,
            vocab_size=model_config.get_vocab_size(),
            max_logprobs=model_config.max_logprobs,
            logprobs_mode=model_config.logprobs_mode,
            joint=rectangles[True],
        )
        self.sample_shapes = SampleShapes(
            self.shapes,
            max_rows=self.max_rows,
            # Custom processors may run arbitrary code on the host, so they are not captured; they index logits by row.
            lists=self.backend.traits.compiles and self.custom is None,
            needs_rectangle=rectangles,
        )
        self._downloads = Downloads(self.backend, overlap=self.async_scheduling)
        self.reports = Reports(self.backend, self._downloads, self.recorder)

    def _make_drafting(self, *, is_profile: bool) -> Drafting:
        if self.speculation is None or (is_profile and not self.speculation.needs_device):
            return Drafting()
        return load_drafting(
            DraftingContext(
                speculation=self.speculation,
                vllm_config=self.vllm_config,
                requests=self.requests,
                recorder=self.recorder,
                shapes=self.shapes,
                kv_cache=self.kv_cache,
                hidden_states=self.hidden_states,
                target=self.target,
                drafter=self.drafter,
                sampling=self.sampling,
            )
        )

    def release_late_interaction_query_cache(self, query_keys: list[str]) -> None:
        """Release queries that have been compared with all of their documents. Called by vLLM's worker."""
        if self.pooling is not None:
            self.pooling.comparisons.release_queries(query_keys)

    def reset_encoder_cache(self) -> None:
        for extension in self.extensions:
            extension.reset_encoder_cache()

    # --- attributes for functions that users send to workers, named as in vLLM's runner ---

    @property
    def model(self) -> nn.Module:
        return self.get_model()

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @property
    def device(self) -> torch.device:
        return self.backend.traits.torch_device

    def get_model(self) -> nn.Module:
        return self.target.model

    def get_draft_model(self) -> nn.Module | None:
        """Return the drafter's model, or None if the drafter is not a model."""
        return None if self.drafter is None else self.drafter.model
