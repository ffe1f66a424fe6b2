"""The worker, which handles device start-up, the memory budget, and its own life cycle. The model runner runs steps."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger

from vllm_gaudi_spec.config import FP8_KV, UnsupportedConfigError
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.devices.common.group_check import check_groups
from vllm_gaudi_spec.drafting.memory import NO_ROOM_FOR_KV
from vllm_gaudi_spec.environment import SELF_TEST, name_process_group
from vllm_gaudi_spec.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.refusals.features import refuse_new_weights, refuse_sleep
from vllm_gaudi_spec.runner.extensions.pooling import list_tasks
from vllm_gaudi_spec.runner.model_runner import ModelRunner
from vllm_gaudi_spec.runner.profile import peak_bytes
from vllm_gaudi_spec.runner.stages import EarlyStage
from vllm_gaudi_spec.runner.warmup import warm_up
from vllm_gaudi_spec.self_test.result import ASYNC_SCHEDULING, KV_FROM_FREE_MEMORY, KV_IN_FP8, SPECULATION
from vllm_gaudi_spec.self_test.run import check_device_once
from vllm_gaudi_spec.upstream.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_distributed_timeout_or_none,
    get_pp_group,
    get_tp_group,
    init_distributed_environment,
)
from vllm_gaudi_spec.upstream.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm_gaudi_spec.upstream.worker import (
    CompilationTimes,
    WorkerBase,
    WorkerProfiler,
    clear_layer_kv_caches,
    create_worker_profiler,
    get_worker_rank_suffix,
    set_random_seed,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.lora.manager import AdapterLoader
    from vllm_gaudi_spec.self_test.result import Result
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheSpec
    from vllm_gaudi_spec.upstream.scheduler import GrammarOutput, SchedulerOutput

logger = init_logger(__name__)


class Worker(WorkerBase):
    """vLLM's worker, adapted to all devices of this plugin."""

    model_runner: ModelRunner
    self_test: Result | None = None
    """The result of the self-test, or None if nothing is captured, as on a CPU, or if the user skips the self-test."""
    profiler: WorkerProfiler | None = None
    """vLLM's profiler, after it has been started for the first time."""

    # --- start-up, in calling order ---

    def init_device(self) -> None:
        self.backend = load_backend()
        atexit.register(_shut_down_at_exit, weakref.ref(self))
        parallel = self.parallel_config
        # vLLM also calls `set_device` in each thread that waits for results.
        card = self.current_platform.find_card(self.local_rank, parallel.assigned_physical_gpu_ids)
        self.device = torch.device(self.backend.traits.torch_device.type, card)
        self.current_platform.set_device(self.device)
        name_process_group(self.distributed_init_method)
        if parallel.use_ray:
            from vllm_gaudi_spec.upstream.ray import use_node_address

            use_node_address()
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.current_platform.dist_backend,
            get_distributed_timeout_or_none(),
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
        runner = ModelRunner if get_pp_group().is_last_rank else EarlyStage
        self.model_runner = runner(self.vllm_config, self.backend, shows_progress=self.is_driver_worker)

    def _test_device(self) -> None:
        """Run the self-test before spending minutes on loading weights and capturing graphs.

        No-op if nothing is captured or if the user skips the self-test.
        """
        if not (self.backend.traits.captures and SELF_TEST.is_on):
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
        assert not load_dummy_weights, "only elastic expert parallelism calls this, and it is rejected at start-up"
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
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        """Return the data with which other servers read this rank's KV, by pipeline and tensor-parallel rank."""
        if not has_kv_transfer_group() or (metadata := get_kv_transfer_group().get_handshake_metadata()) is None:
            return None
        return {(get_pp_group().rank_in_group, get_tp_group().rank_in_group): metadata}

    def compile_or_warm_up_model(self) -> CompilationTimes:
        started = time.perf_counter()
        with torch.inference_mode():
            warm_up(self.model_runner)
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=time.perf_counter() - started, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        if self.model_config.runner_type == "pooling":
            return list_tasks(self.get_model())
        return ("generate",)

    # --- steps ---

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        assert isinstance(scheduler_output, SpecSchedulerOutput)  # the platform selects the scheduler
        self.model_runner.residence.check_step(scheduler_output)
        if self.profiler is not None:
            self.profiler.step()
        return self.model_runner.execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.model_runner.take_draft_token_ids()

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Run a step without requests, because data-parallel ranks that share experts with this rank have requests."""
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

    # --- sleep and weight updates, for which vLLM has already paused the engine ---

    @torch.inference_mode()
    def sleep(self, level: int = 1) -> None:
        refuse_sleep(self.vllm_config, self.backend, level)
        self.model_runner.residence.sleep(level)

    @torch.inference_mode()
    def discard(self, tags: Collection[str]) -> None:
        refuse_sleep(self.vllm_config, self.backend)
        self.model_runner.residence.discard(tags)

    @torch.inference_mode()
    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_runner.residence.wake_up(tags)
        self.backend.graphs.warmed_up()  # Do not count graphs that are compiled during wake-up as compiled by a step.

    @torch.inference_mode()
    def reload_weights(self, *args: Any, **named: Any) -> None:
        refuse_new_weights(self.vllm_config, self.backend)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.residence.reload(*args, **named)
        self.reset_encoder_cache()
        self.backend.graphs.warmed_up()

    # --- queries and life cycle ---

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **iterations: int | None) -> None:
        """Start or stop vLLM's profiler, which traces this worker. Values in `iterations` limit the steps."""
        config = self.vllm_config.profiler_config
        if config.profiler is None:
            raise UnsupportedConfigError("Profiling is not enabled; start the engine with --profiler-config.")
        if is_start:
            name = "_".join(filter(None, (profile_prefix, get_worker_rank_suffix(global_rank=self.rank))))
            if self.profiler is None:
                self.profiler = create_worker_profiler(config, worker_name=name, local_rank=self.local_rank)
            self.profiler.set_output_name(name)
            self.profiler.start(**iterations)
        elif self.profiler is not None:
            self.profiler.stop()

    def step_report(self) -> dict[str, object]:
        """Return step signatures, device-to-host syncs, and resources used by requests. Call through
        `collective_rpc`."""
        return self.model_runner.step_report()

    def save_measurements(self) -> None:
        """Save the measurements collected so far, if QUANT_CONFIG or draft_quant_config selects the measuring mode.

        This method can be called any number of times through `collective_rpc`. It is also called at shutdown.
        """
        self.model_runner.save_measurements()

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_draft_model(self) -> nn.Module | None:
        return self.model_runner.get_draft_model()

    def synchronize_device(self) -> None:
        self.backend.memory.synchronize()

    def reset_encoder_cache(self) -> None:
        self.model_runner.reset_encoder_cache()

    def shutdown(self) -> None:
        ensure_kv_transfer_shutdown()
        if getattr(self, "model_runner", None) is not None:
            if getattr(self.model_runner, "target", None) is not None:
                self.model_runner.save_measurements()
            clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
            del self.model_runner
            gc.collect()
        if self.profiler is not None:
            self.profiler.shutdown()


def _shut_down_at_exit(reference: weakref.ref[Worker]) -> None:
    """Shut down a worker whose engine runs in the caller's process, and make processes exit quickly.

    This function is registered after the software of the device is loaded, so it runs before torch_npu's exit function
    destroys the process groups. Later, the worker could no longer leave these groups. vLLM kills child processes that
    take more than five seconds to exit. Freezing the garbage collector avoids a final collection of all loaded objects.
    """
    worker = reference()
    if worker is not None and getattr(worker, "model_runner", None) is not None:  # vLLM has not shut it down yet
        try:
            worker.shutdown()
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
    if multiprocessing.parent_process() is not None:
        gc.freeze()
