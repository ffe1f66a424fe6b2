"""The worker: device start-up, memory budget and life cycle. Steps are the model runner's."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from vllm.config import set_current_vllm_config, update_config
from vllm.logger import init_logger

from vllm_gaudi_spec.config import FP8_KV, UnsupportedConfigError, in_one_line, needs_batch_invariance
from vllm_gaudi_spec.devices import load_backend
from vllm_gaudi_spec.devices.common.group_check import check_groups
from vllm_gaudi_spec.drafting.memory import NO_ROOM_FOR_KV
from vllm_gaudi_spec.environment import name_process_group, runs_self_test
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.quantization.config import target_config
from vllm_gaudi_spec.runner.extensions.pooling import list_tasks
from vllm_gaudi_spec.runner.model_runner import ModelRunner
from vllm_gaudi_spec.runner.profile import peak_bytes
from vllm_gaudi_spec.self_test.result import ASYNC_SCHEDULING, KV_FROM_FREE_MEMORY, KV_IN_FP8, SPECULATION
from vllm_gaudi_spec.self_test.run import check_device_once
from vllm_gaudi_spec.upstream.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_tp_group,
    init_distributed_environment,
)
from vllm_gaudi_spec.upstream.models import (
    ShardedStateLoader,
    compute_tensor_digests,
    finalize_layerwise_reload,
    get_model_loader,
    reload_weights,
)
from vllm_gaudi_spec.upstream.worker import CompilationTimes, WorkerBase, clear_layer_kv_caches, set_random_seed

if TYPE_CHECKING:
    from vllm.config import LoadConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.lora.manager import AdapterLoader
    from vllm_gaudi_spec.self_test.result import Result
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheSpec
    from vllm_gaudi_spec.upstream.scheduler import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)


_NO_TRANSFER = "Weight transfer is not supported; use reload_weights with weights_iterator or weights_path."


def _refuse(reason: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a call of vLLM's worker interface that is not supported."""

    def refuse(self: Worker, *args: object, **named: object) -> NoReturn:
        raise UnsupportedConfigError(reason)

    return refuse


class Worker(WorkerBase):
    """vLLM's worker on every device."""

    model_runner: ModelRunner
    self_test: Result | None = None
    """None if nothing is captured, as on the CPU, or if the user skips the self-test."""

    # --- start-up, in the order of the calls ---

    def init_device(self) -> None:
        self.backend = load_backend()
        atexit.register(_shut_down_at_exit, weakref.ref(self))
        parallel = self.parallel_config
        # vLLM also calls `set_device` in each thread that waits for results.
        card = self.current_platform.find_card(self.local_rank, parallel.assigned_physical_gpu_ids)
        self.device = torch.device(self.backend.traits.torch_device.type, card)
        self.current_platform.set_device(self.device)
        name_process_group(self.distributed_init_method)
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.current_platform.dist_backend,
        )
        ensure_model_parallel_initialized(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        )
        check_groups(self.backend.memory)
        set_random_seed(self.model_config.seed)
        logger.info(
            "Device %s, mode %s, %s.", self.backend.traits.name, self.backend.traits.mode, self.model_config.dtype
        )
        self._test_device()
        self.model_runner = ModelRunner(self.vllm_config, self.backend, shows_progress=self.is_driver_worker)

    def _test_device(self) -> None:
        """Run the self-test before minutes are spent on weights and graphs.

        No-op if nothing is captured, or if the user skips it.
        """
        if not (self.backend.traits.captures and runs_self_test()):
            return
        group = get_tp_group()
        self.self_test = found = check_device_once(self.model_config.dtype, group if group.world_size > 1 else None)
        in_use = {
            ASYNC_SCHEDULING: self.vllm_config.scheduler_config.async_scheduling,
            SPECULATION: self.vllm_config.speculative_config is not None,
            KV_IN_FP8: self.cache_config.cache_dtype == FP8_KV,
            KV_FROM_FREE_MEMORY: self.cache_config.kv_cache_memory_bytes is None,
        }
        found.refuse({feature for feature, is_on in in_use.items() if is_on})
        logger.info("Self-test of the card: %s.", found.summarize())
        for check in found.failed:
            logger.warning("Self-test of the card: %s (not needed by this configuration).", check)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise UnsupportedConfigError("Elastic expert parallelism is not supported; leave out --enable-elastic-ep.")
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.load_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.kv_cache_spec()

    def determine_available_memory(self) -> int:
        explicit = self.cache_config.kv_cache_memory_bytes
        if explicit is not None:
            return explicit
        size = self.backend.memory.available_memory(
            self.cache_config.gpu_memory_utilization, self.parallel_config.local_world_size
        )
        for what, num_bytes in self.model_runner.bytes_beside_kv().items():
            size -= num_bytes
            logger.info("%.2f GiB for %s.", num_bytes / 2**30, what)
        if size <= 0:
            raise UnsupportedConfigError(NO_ROOM_FOR_KV)
        with torch.inference_mode():
            size -= peak_bytes(self.model_runner, size)
        logger.info("%.1f GiB for the KV cache; --kv-cache-memory-bytes sets another size.", size / 2**30)
        return size

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    @torch.inference_mode()
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        started = time.perf_counter()
        with torch.inference_mode():
            self.model_runner.warm_up()
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=time.perf_counter() - started, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        if self.model_config.runner_type == "pooling":
            return list_tasks(self.get_model())
        return ("generate",)

    # --- steps ---

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        assert isinstance(scheduler_output, SpecSchedulerOutput)  # the platform sets the scheduler
        return self.model_runner.execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.model_runner.take_draft_token_ids()

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Run a step without requests, because data-parallel ranks that share experts with this one have some."""
        self.model_runner.execute_dummy_batch()

    # --- LoRA adapters ---

    @torch.inference_mode()
    def add_lora(self, lora_request: LoRARequest) -> bool:
        return self._adapters().add_adapter(lora_request)

    @torch.inference_mode()
    def remove_lora(self, lora_id: int) -> bool:
        return self._adapters().remove_adapter(lora_id)

    @torch.inference_mode()
    def pin_lora(self, lora_id: int) -> bool:
        return self._adapters().pin_adapter(lora_id)

    def list_loras(self) -> set[int]:
        return self._adapters().list_adapters()

    def _adapters(self) -> AdapterLoader:
        if self.model_runner.target.adapters is None:
            raise ValueError("The engine was started without LoRA adapters; use --enable-lora.")
        return self.model_runner.target.adapters.loader

    # --- weights of a running engine, through `collective_rpc` ---

    @property
    def _weights(self) -> ModelWeights:
        return ModelWeights(self.vllm_config, self.get_model(), self.backend)

    @torch.inference_mode()
    def reload_weights(self, *args: Any, **named: Any) -> None:
        """Reload weights from `weights_iterator`, `weights_path` or the model's own files, as in vLLM's worker."""
        with set_current_vllm_config(self.vllm_config):
            self._weights.reload(*args, **named)

    def update_config(self, overrides: dict[str, Any]) -> None:
        """Update load_config, or the fields of model_config that name the weights, for `reload_weights`."""
        check_overrides(overrides)
        load_config: LoadConfig = update_config(self.vllm_config.load_config, overrides.get("load_config", {}))
        self.load_config = self.vllm_config.load_config = load_config
        for name, value in overrides.get("model_config", {}).items():
            setattr(self.model_config, name, value)  # in place: the object identifies the target

    @torch.inference_mode()
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        self._weights.save_sharded_state(path, pattern, max_size)

    @torch.inference_mode()
    def compute_weight_checksums(self) -> dict[str, str]:
        """Return a digest of each weight, by name with the same prefix as in vLLM's worker."""
        ranks = f"dp{self.parallel_config.data_parallel_index}:pp0:pcp0:tp{get_tp_group().rank_in_group}:"
        return {ranks + name: digest for name, digest in self._weights.compute_checksums().items()}

    # vLLM has already paused the engine, which stays paused until `wake_up`.
    sleep = discard = _refuse(
        "Sleep mode is not supported; end the engine to free its memory. Once paused, requests wait until wake_up."
    )
    profile = _refuse("Profiling through the engine is not supported; profile the process from outside.")
    reset_weights = _refuse("Weights are not reset; use reload_weights.")
    save_tensorized_model = _refuse("Tensorizer files are not written; use save_sharded_state.")
    init_weight_transfer_engine = shutdown_weight_transfer_engine = _refuse(_NO_TRANSFER)
    start_weight_update = start_draft_weight_update = update_weights = finish_weight_update = _refuse(_NO_TRANSFER)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """No-op: this platform does not release memory while sleeping.

        vLLM considers the engine asleep even though `discard` was refused, and schedules nothing until it wakes up.
        """

    # --- questions and life cycle ---

    def step_report(self) -> dict[str, object]:
        """Return step signatures, device-to-host syncs and what requests hold. Called through `collective_rpc`."""
        return self.model_runner.step_report()

    def save_measurements(self) -> None:
        """Write the measurements so far, if QUANT_CONFIG or draft_quant_config measures.

        Can be called any number of times through `collective_rpc`. Shutdown calls it once more.
        """
        self.model_runner.save_measurements()

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_draft_model(self) -> nn.Module | None:
        return self.model_runner.get_draft_model()

    def synchronize_device(self) -> None:
        self.backend.memory.synchronize()

    def reset_encoder_cache(self) -> None:
        """Reset the encoder cache. No-op for models without encoders."""
        self.model_runner.reset_encoder_cache()

    def shutdown(self) -> None:
        if getattr(self, "model_runner", None) is not None:
            if getattr(self.model_runner, "target", None) is not None:
                self.model_runner.save_measurements()
            clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
            del self.model_runner
            gc.collect()


def _shut_down_at_exit(reference: weakref.ref[Worker]) -> None:
    """Shut down a worker whose engine runs in the caller's process, and make processes exit quickly.

    Registered after the device's software is loaded, this runs before torch_npu's exit function destroys the process
    groups, which the worker could not leave afterwards. vLLM kills child processes that take more than five seconds to
    exit; freezing the garbage collector skips a last pass over everything that was loaded.
    """
    worker = reference()
    if worker is not None and getattr(worker, "model_runner", None) is not None:  # vLLM has not shut it down
        try:
            worker.shutdown()
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
    if multiprocessing.parent_process() is not None:
        gc.freeze()


class ModelWeights:
    """The target's weights while the engine runs: replaced in place, saved and compared by checksum.

    Captured graphs read weights at the addresses they had in warm-up, so new weights are copied into the same storage.
    vLLM's loader does that layer by layer (`model_loader.reload`). The backend updates a device's copies of a weight.
    """

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, backend: DeviceBackend) -> None:
        self._vllm_config = vllm_config
        self._model = model
        self._backend = backend

    # --- read by vLLM's helpers, with packed weights as they were before packing ---

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, weight) for name, weight in self._model.named_parameters() if weight.numel())
        yield from self._backend.weights.unpacked_weights(self._model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the weights on the host. Of several names of a weight the first one is used, as the loader expects."""
        state = self._model.state_dict(keep_vars=True)
        names = {id(tensor): name for name, tensor in sorted(state.items(), reverse=True)}
        weights = {name: state[name].detach().cpu() for name in names.values()}
        return weights | dict(self._backend.weights.unpacked_weights(self._model))

    # --- called by users ---

    def reload(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Replace the weights. Takes the arguments of vLLM's worker; without any, reads the model's own files again."""
        for reason in self._refusals("reload_weights"):
            raise UnsupportedConfigError(reason)
        if not is_checkpoint_format:
            raise ValueError("reload_weights takes weights as in a checkpoint; leave is_checkpoint_format out.")
        if weights_iterator is not None and weights_path is not None:
            raise ValueError("reload_weights takes weights_iterator or weights_path, not both; leave one out.")
        source = "weights_iterator" if weights_iterator is not None else self._check_files(weights_path)
        model_config = self._vllm_config.model_config
        try:
            reload_weights(self._vllm_config, self._model, weights_iterator, weights_path, is_checkpoint_format=True)
        except Exception as error:  # each model's loader raises its own errors for wrong names and shapes
            finalize_layerwise_reload(self._model, model_config)  # otherwise layers would be left without storage
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = in_one_line(error).rstrip(".")
            raise ValueError(
                f"The weights of {source} do not fit {model_config.architecture}: {reason}. Some of them are in the "
                "model now: call reload_weights with weights that fit, or restart the engine."
            ) from error
        finally:
            self._backend.weights.weights_changed(self._model)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write this rank's files for `--load-format sharded_state`."""
        for reason in self._refusals("save_sharded_state"):
            raise UnsupportedConfigError(reason)
        Path(path).mkdir(parents=True, exist_ok=True)
        stand_in: Any = self
        ShardedStateLoader.save_model(stand_in, path, pattern=pattern, max_size=max_size)

    def compute_checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each weight of this rank, by name."""
        for reason in self._refusals("compute_weight_checksums"):
            raise UnsupportedConfigError(reason)
        stand_in: Any = self
        return compute_tensor_digests(stand_in)

    def _check_files(self, weights_path: str | None) -> str:
        """Check that the weights can be read before any layer is changed, and return the name of their model."""
        load_config, model_config = self._vllm_config.load_config, copy(self._vllm_config.model_config)
        loader = get_model_loader(load_config)
        if not hasattr(loader, "get_all_weights"):
            raise ValueError(
                f"Weights of load format {load_config.load_format} cannot be reloaded; set another one first with "
                'update_config({"load_config": {"load_format": "auto"}}).'
            )
        if weights_path is not None:
            model_config.model, model_config.model_weights, model_config.revision = weights_path, "", None
        try:
            loader.download_model(model_config)
        except UnsupportedConfigError:
            raise
        except Exception as error:
            raise ValueError(
                f"The weights of {model_config.model} cannot be read: {in_one_line(error).rstrip('.')}."
            ) from error
        return str(model_config.model)

    def _refusals(self, method: str) -> Iterator[str]:
        """Yield reasons why this model does not support a method."""
        model = self._vllm_config.model_config
        if self._vllm_config.lora_config is not None:
            yield f"{method} does not work with LoRA adapters; leave out --enable-lora."
        if target_config() is not None:
            yield f"{method} does not work with QUANT_CONFIG; unset it."
        if method == "reload_weights" and needs_batch_invariance(self._vllm_config):
            yield f"{method} does not work with batch_invariant, since vLLM packs new weights again; leave it out."
        if model.quantization is not None:
            yield f"{method} is for weights in the model's dtype, and those of {model.model} are {model.quantization}."
        if method == "reload_weights" and model.supports_multimodal_inputs:
            yield f"{method} does not work with images, whose embeddings are kept; add --language-model-only."
        if model.is_moe:
            yield f"{method} does not work with experts, which {model.model} has; use a model without them."
        if model.use_mla:
            yield f"{method} does not work with MLA attention, which {model.model} has; use a model without it."


# Fields of model_config that reload_weights reads.
_RELOADED_FROM = ("model", "model_weights", "revision")


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ValueError for overrides of `update_config` that a running engine does not read."""
    for name, fields in overrides.items():
        if name not in ("load_config", "model_config"):
            raise ValueError(
                f"update_config takes load_config and model_config, got {name}; restart the engine with it."
            )
        useless = [field for field in fields if name == "model_config" and field not in _RELOADED_FROM]
        if useless:
            raise ValueError(
                f"{', '.join(useless)} of model_config cannot be changed while the engine runs (only "
                f"{', '.join(_RELOADED_FROM)} can, for reload_weights); restart the engine with it."
            )
