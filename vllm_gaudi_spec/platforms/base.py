"""vLLM's platform hooks for all devices, implemented with the selected backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum, set_assigned_physical_gpu_ids

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import (
    ADDITIONAL_CONFIG_KEY,
    RETOKENIZE,
    Options,
    Speculation,
    UnsupportedConfigError,
    get_target_config,
)
from vllm_gaudi_spec.device_table import load_backend, refuse_unknown_device
from vllm_gaudi_spec.environment import DEVICE, choose_start_method
from vllm_gaudi_spec.methods import NGRAM, NGRAM_GPU
from vllm_gaudi_spec.quantization.dequantized import choose_kernels, read_weights, use_device
from vllm_gaudi_spec.quantization.kv_scheme import choose_kv_dtype, drop_scales_set_aside
from vllm_gaudi_spec.recurrent.table import has_states
from vllm_gaudi_spec.refusals import refuse_unsupported
from vllm_gaudi_spec.refusals.features import OFFLOADING, refuse_sleep
from vllm_gaudi_spec.refusals.models import list_models
from vllm_gaudi_spec.refusals.requests import check_constraint_size, check_logit_edits, check_request
from vllm_gaudi_spec.refusals.speculation import list_installed_logits_processors
from vllm_gaudi_spec.runner.shapes import Shapes
from vllm_gaudi_spec.upstream.platforms import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig

    from vllm_gaudi_spec.upstream.platforms import FlexibleArgumentParser

logger = init_logger(__name__)

_SCHEDULERS = {
    False: "vllm_gaudi_spec.scheduling.scheduler.SpecScheduler",
    True: "vllm_gaudi_spec.scheduling.scheduler.SpecAsyncScheduler",
}
"""Schedulers for synchronous (False) and async (True) scheduling."""


def is_active() -> bool:
    """Whether this is the active vLLM platform."""
    from vllm.platforms import current_platform

    return isinstance(current_platform, SpecPlatform)


def apply_patches() -> None:
    """Apply the patches that every vLLM process needs on this platform."""
    from vllm.platforms import current_platform

    upstream.apply()
    upstream.answer_accelerator_calls(current_platform.device_type)
    importlib.import_module("vllm_gaudi_spec.quantization.method")  # imports vLLM modules that require the platform
    use_device(load_backend)
    upstream.refuse_tokenized_params(check_logit_edits)
    upstream.refuse_params_before_verification(check_constraint_size)
    upstream.read_weights(
        lambda tensors, model, loaded: read_weights(drop_scales_set_aside(tensors, model), model, loaded)
    )


class SpecPlatform(Platform):
    takes_device_ids = False
    """Whether each process sees all cards and uses one of the cards in --device-ids. If not, the environment determines
    which cards a process sees."""

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        upstream.apply()
        upstream.answer_accelerator_calls(cls.device_type)
        if parser is not None:
            upstream.end_errors_with_their_message()
            upstream.mend_adapter_loading()
            upstream.answer_bad_media()
            upstream.fail_with_the_engine()
        refuse_unknown_device()

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        if vllm_config.model_config is not None:
            for model, _ in list_models(vllm_config):
                has_fp8 = load_backend().weights.fp8_arithmetic is not None
                choose_kv_dtype(vllm_config, model, has_fp8=has_fp8)
                choose_kernels(vllm_config, model, load_backend())
        refuse_unsupported(vllm_config, load_backend())
        speculative = vllm_config.speculative_config
        if speculative is not None and speculative.method == NGRAM and load_backend().traits.captures:
            speculative.method = NGRAM_GPU  # it generates the same drafts without making the device wait for them
        if (transfer := vllm_config.kv_transfer_config) is not None and transfer.kv_connector == "OffloadingConnector":
            transfer.kv_connector_extra_config = OFFLOADING | transfer.kv_connector_extra_config
        _disable_vllm_state_caching(vllm_config)
        _require_whole_images(vllm_config)
        _warn_about_unused_options(vllm_config)
        # Parse options here so that the front end, rather than the engine, reports mistakes.
        options = Options.from_vllm(vllm_config)
        if vllm_config.model_config is not None:
            speculation = Speculation.from_vllm(vllm_config)
            Shapes.from_config(vllm_config, options, load_backend(), speculation.widths if speculation else ())
            if vllm_config.scheduler_config.async_scheduling and (
                reason := _explain_sync_scheduling(vllm_config, speculation)
            ):
                logger.info("Async scheduling is disabled: %s.", reason)
                vllm_config.scheduler_config.async_scheduling = False
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            # This check is skipped in engine processes, where this method runs again, and in servers started by vLLM's
            # data-parallel supervisor, in which vLLM has already assigned the cards.
            if parallel.assigned_physical_gpu_ids and not parallel.data_parallel_external_lb:
                cls._check_device_ids(parallel.assigned_physical_gpu_ids, parallel.local_world_size)
            parallel.worker_cls = "vllm_gaudi_spec.worker.Worker"
        if parallel.use_ray:
            parallel.ray_runtime_env = _add_device_to_environment(parallel.ray_runtime_env)
        _choose_scheduler(vllm_config.scheduler_config)
        # The backend captures graphs itself, so vLLM's compilation would wrap the model a second time.
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        module = "vllm_gaudi_spec.platforms.attention"
        return f"{module}.{'LatentAttentionBackend' if attn_selector_config.use_mla else 'RectangleAttentionBackend'}"

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        return resolve_obj_by_qualname("vllm_gaudi_spec.platforms.attention.NoPrefill")

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_gaudi_spec.lora.application.TokenSlots"

    @classmethod
    def can_update_inplace(cls) -> bool:
        """Return False. Layers with LoRA adapters then use the sum that is returned to them."""
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def _align_hybrid_block_size(cls, vllm_config: VllmConfig, backend_cls: Any) -> None:
        """No-op: KV blocks need not match the size of recurrent states, which are stored per request."""

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """No-op: the drafter and the target may have layers with the same index."""

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        if not isinstance(params, SamplingParams):
            return
        if reason := check_request(params, prompt=processed_inputs):
            raise VLLMValidationError(reason)

    @classmethod
    def import_ir_kernels(cls) -> None:
        super().import_ir_kernels()
        cls._norms()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        from vllm.config.kernel import IrOpPriorityConfig

        norms = [cls._norms(), "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=norms, fused_add_rms_norm=norms)

    @classmethod
    def _norms(cls) -> str:
        """Return the name in vLLM's IR under which the device's `layers.py` registers its norm kernels."""
        load_backend()  # a data-parallel engine calls this method before a worker has loaded the device's software
        provider: str = importlib.import_module(f"{cls.__module__.rpartition('.')[0]}.layers").PROVIDER
        return provider

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def find_card(cls, local_rank: int, assigned: list[int] | None) -> int:
        """Return the index of a rank's card among the cards that this process sees.

        Args:
            assigned: The cards that vLLM assigned to the ranks of the engine on this machine, if any.
        """
        if not (cls.takes_device_ids and assigned):
            return local_rank
        set_assigned_physical_gpu_ids(assigned)
        return cls.logical_device_id_to_visible_device_id(local_rank)

    @classmethod
    def _check_device_ids(cls, requested: list[int], num_ranks: int) -> None:
        if not cls.takes_device_ids:
            raise UnsupportedConfigError(
                f"--device-ids has no effect on {load_backend().traits.name}; leave it out, and set "
                f"{cls.device_control_env_var}."
            )
        if len(requested) < num_ranks:
            raise UnsupportedConfigError(
                f"--device-ids names {len(requested)} cards for {num_ranks} ranks; name one for each."
            )

    @classmethod
    def is_sleep_mode_available(cls) -> bool:
        # vLLM calls this method only if sleep mode is enabled. vLLM's own error message does not name an option.
        refuse_sleep(None, load_backend())
        return True


class CapturingPlatform(SpecPlatform):
    """Base class for the platforms of accelerators, which capture steps as graphs."""

    # All devices are declared out of tree, because vLLM would load compiled operations for devices that it supports.
    _enum = PlatformEnum.OOT
    # Used in vLLM's compiled helpers, some of which are created before the software of the device is loaded.
    simple_compile_backend = "eager"
    loads_on_host = False
    """Whether weights are assembled on the host and copied only once, which avoids thousands of small graphs."""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        if cls.loads_on_host and vllm_config.load_config.device is None:
            vllm_config.load_config.device = "cpu"
        configs = vllm_config.model_config, vllm_config.speculative_config
        if any(config is not None and config.enforce_eager for config in configs):
            device = load_backend().traits.name
            logger.warning_once("enforce_eager has no effect on %s, where all steps are captured.", device)
        _disable_hybrid_kv_manager(vllm_config)
        # If a process has opened a card, a process forked from it cannot use the card or hangs at exit.
        choose_start_method(lambda: "spawn")

    @classmethod
    def import_kernels(cls) -> None:
        """No-op: vLLM's compiled operations are for other devices."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return load_backend().traits.name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return 0, because vLLM's front end derives the token budget from this size and must not open the card."""
        return 0


def _choose_scheduler(config: SchedulerConfig) -> None:
    """Select one of our schedulers. Other schedulers do not limit or count drafts."""
    if config.scheduler_cls not in (None, *_SCHEDULERS.values()):
        raise UnsupportedConfigError("Custom schedulers are not supported; leave out --scheduler-cls.")
    config.scheduler_cls = _SCHEDULERS[bool(config.async_scheduling)]


def _warn_about_unused_options(vllm_config: VllmConfig) -> None:
    """Warn about options that have no effect. vLLM itself sets an attention backend for some models (Gemma 4)."""
    speculation = vllm_config.speculative_config
    for backend in (vllm_config.attention_config.backend, speculation and speculation.attention_backend):
        if backend is not None:
            logger.warning_once(
                "Attention backend %s, set by the user or by vLLM for this model, has no effect: the platform uses its "
                "own.",
                backend.name,
            )
    if unused := [key for key in vllm_config.additional_config or () if key != ADDITIONAL_CONFIG_KEY]:
        logger.warning_once(
            "These keys of additional_config have no effect on this platform: %s.", ", ".join(map(repr, unused))
        )
    if speculation is not None and (unused := list_installed_logits_processors()):
        logger.warning_once(
            "Logits processors of installed packages have no effect with speculative decoding: %s.", ", ".join(unused)
        )


def _disable_vllm_state_caching(vllm_config: VllmConfig) -> None:
    """Disable vLLM's caching of recurrent states, which requires that states be stored in KV blocks.

    On this platform, each request has one state, and the scheduler's `Snapshots` implement prefix caching for it.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model is None or not has_states(model):
        return
    if cache.mamba_cache_mode == "all":
        logger.warning(
            "--mamba-cache-mode has no effect on this platform; set state_snapshots to keep snapshots of states."
        )
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = model.max_model_len  # vLLM's value if prefix caching is disabled


def _require_whole_images(vllm_config: VllmConfig) -> None:
    """Ensure that each step computes whole images if image tokens attend to each other bidirectionally.

    vLLM leaves this to platforms. If the option is set, vLLM checks at startup that a whole image fits in a step.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is None or not model.is_mm_prefix_lm:
        return
    if not scheduler.disable_chunked_mm_input:
        logger.info("Attention within images is bidirectional, so prompt chunks do not split images.")
        scheduler.disable_chunked_mm_input = True
    if scheduler.long_prefill_token_threshold:
        logger.warning(
            "--long-prefill-token-threshold is ignored, because so short a prompt chunk may have no room for an image."
        )
        scheduler.long_prefill_token_threshold = 0
    fewer, room = scheduler.max_num_scheduled_tokens, scheduler.max_num_batched_tokens
    if fewer is not None and fewer < room:
        raise UnsupportedConfigError(
            f"--max-num-scheduled-tokens {fewer} may leave no room for an image of {model.model}, which must be "
            "computed in one step; leave it out."
        )


def _disable_hybrid_kv_manager(vllm_config: VllmConfig) -> None:
    """Disable the hybrid KV cache manager for models whose layers have KV of different shapes.

    vLLM lets groups of layers share memory, but on these devices, KV is stored in typed tensors. Without groups, each
    layer has separate memory, and sliding windows do not save any.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is None or model is not get_target_config(vllm_config) or scheduler.disable_hybrid_kv_cache_manager:
        return  # the configuration copied for a drafter shares the scheduler settings of the target
    every = [one.model_arch_config for one, _ in list_models(vllm_config)]
    layers = [config[index] for config in every for index in range(config.total_num_hidden_layers)]
    shapes = {(layer.head_size, layer.total_num_kv_heads) for layer in layers}
    if len(shapes) == 1:
        return
    if scheduler.disable_hybrid_kv_cache_manager is False:
        raise UnsupportedConfigError(
            f"Layers have KV of {len(shapes)} shapes, which cannot share memory on this device; leave out "
            "--no-disable-hybrid-kv-cache-manager."
        )
    logger.info("The hybrid KV cache manager is disabled: layers have KV of %d shapes.", len(shapes))
    scheduler.disable_hybrid_kv_cache_manager = True


def _add_device_to_environment(runtime_env: Any) -> dict[str, Any]:
    """Add VGS_DEVICE to Ray's runtime environment, because a rank selects its platform before it has other
    variables."""
    env: dict[str, Any] = dict(runtime_env or {})
    return {**env, "env_vars": {DEVICE.name: load_backend().traits.name, **env.get("env_vars", {})}}


def _explain_sync_scheduling(vllm_config: VllmConfig, speculation: Speculation | None) -> str | None:
    """Return the reason why async scheduling is not possible, or None if it is possible."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline stages receive the last stage's sampled tokens through the scheduler"
    if vllm_config.model_config.runner_type == "pooling":
        return "a pooler runs on the host"
    if speculation is None:
        if vllm_config.model_config.logits_processors or list_installed_logits_processors():
            return "custom logits processors read a request's tokens on the host"
        return None
    if speculation.on_device:
        return None
    name = f"universal_context {RETOKENIZE}" if speculation.retokenizes else f"method {speculation.method}"
    return f"{name} drafts on the host, after it has read a step's result"
