"""vLLM's worker: device start, memory budget, life cycle. Steps are the runner's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.config.utils import update_config
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, init_distributed_environment
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.utils import clear_layer_kv_caches
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_gaudi_spec.config import FP8_KV, UnsupportedConfigError
from vllm_gaudi_spec.devices import load_backend
from vllm_gaudi_spec.devices.common.group_check import check_groups
from vllm_gaudi_spec.drafting.memory import NO_ROOM_FOR_KV
from vllm_gaudi_spec.environment import name_process_group, runs_self_test
from vllm_gaudi_spec.runner.model_runner import ModelRunner
from vllm_gaudi_spec.runner.profile import peak_bytes
from vllm_gaudi_spec.runner.weights import check_overrides
from vllm_gaudi_spec.scheduling.outputs import SpecSchedulerOutput
from vllm_gaudi_spec.self_test.result import ASYNC_SCHEDULING, KV_FROM_FREE_MEMORY, KV_IN_FP8, SPECULATION
from vllm_gaudi_spec.self_test.run import of_this_process

if TYPE_CHECKING:
    from vllm.config import LoadConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

    from vllm_gaudi_spec.lora.manager import AdapterLoader
    from vllm_gaudi_spec.self_test.result import Result

logger = init_logger(__name__)


_NO_TRANSFER = "Weight transfer is not supported; use reload_weights with weights_iterator or weights_path."


def _refuse(reason: str) -> Callable[..., NoReturn]:
    """A method of vLLM's worker that has no meaning here."""

    def refuse(self: Worker, *args: object, **named: object) -> NoReturn:
        raise UnsupportedConfigError(reason)

    return refuse


class Worker(WorkerBase):
    model_runner: ModelRunner
    self_test: Result | None = None
    """None on the CPU, where nothing is captured, and where the user skips it."""

    # --- start-up, in the order of the calls ---

    def init_device(self) -> None:
        self.backend = load_backend()
        parallel = self.parallel_config
        # vLLM calls `set_device` again in each thread that waits for results.
        card = self.current_platform.card_of(self.local_rank, parallel.assigned_physical_gpu_ids)
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
        """Before minutes are spent on weights and graphs. A no-op where nothing is captured, and where the user skips
        it."""
        if not (self.backend.traits.captures and runs_self_test()):
            return
        group = get_tp_group()
        self.self_test = found = of_this_process(self.model_config.dtype, group if group.world_size > 1 else None)
        in_use = {
            ASYNC_SCHEDULING: self.vllm_config.scheduler_config.async_scheduling,
            SPECULATION: self.vllm_config.speculative_config is not None,
            KV_IN_FP8: self.cache_config.cache_dtype == FP8_KV,
            KV_FROM_FREE_MEMORY: self.cache_config.kv_cache_memory_bytes is None,
        }
        found.refuse({feature for feature, is_on in in_use.items() if is_on})
        logger.info("Self-test of the card: %s.", found.summary())
        for check in found.failed:
            logger.warning("Self-test of the card: %s (not needed by this configuration).", check)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise UnsupportedConfigError("elastic expert parallelism is not supported; leave out --enable-elastic-ep.")
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
        for what, num_bytes in self.model_runner.drafting_bytes().items():
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
        return ("generate",)

    # --- steps ---

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        assert isinstance(scheduler_output, SpecSchedulerOutput)  # the platform chooses the scheduler
        return self.model_runner.execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.model_runner.take_draft_token_ids()

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """A step of a data-parallel rank without requests, while ranks that share experts with it have some."""
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
            raise ValueError("the engine was started without LoRA adapters; use --enable-lora.")
        return self.model_runner.target.adapters.loader

    # --- weights of a running engine, through `collective_rpc` ---

    @torch.inference_mode()
    def reload_weights(self, *args: Any, **named: Any) -> None:
        """As in vLLM's worker: from `weights_iterator`, or `weights_path`, or the model's own files."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.weights.reload(*args, **named)

    def update_config(self, overrides: dict[str, Any]) -> None:
        """For `reload_weights`: options of load_config, and those of model_config that name the weights."""
        check_overrides(overrides)
        load_config: LoadConfig = update_config(self.vllm_config.load_config, overrides.get("load_config", {}))
        self.load_config = self.vllm_config.load_config = load_config
        for name, value in overrides.get("model_config", {}).items():
            setattr(self.model_config, name, value)  # in place: the target's configuration is identified by the object

    @torch.inference_mode()
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        self.model_runner.weights.save_sharded_state(path, pattern, max_size)

    @torch.inference_mode()
    def compute_weight_checksums(self) -> dict[str, str]:
        """By names with the same prefix as in vLLM's worker."""
        ranks = f"dp{self.parallel_config.data_parallel_index}:pp0:pcp0:tp{get_tp_group().rank_in_group}:"
        return {ranks + name: digest for name, digest in self.model_runner.weights.checksums().items()}

    sleep = wake_up = _refuse("Sleep mode is not supported; end the engine to free its memory.")
    profile = _refuse("Profiling through the engine is not supported; profile the process from outside.")
    reset_weights = _refuse("Weights are not reset; use reload_weights.")
    save_tensorized_model = _refuse("Tensorizer files are not written; use save_sharded_state.")
    init_weight_transfer_engine = shutdown_weight_transfer_engine = _refuse(_NO_TRANSFER)
    start_weight_update = start_draft_weight_update = update_weights = finish_weight_update = _refuse(_NO_TRANSFER)

    # --- questions and life cycle ---

    def step_report(self) -> dict[str, object]:
        """Step signatures and device-to-host syncs so far, and what requests hold now; through `collective_rpc`."""
        return self.model_runner.step_report()

    def save_measurements(self) -> None:
        """Where QUANT_CONFIG or draft_quant_config measures: write the measurements so far. Through `collective_rpc`,
        any number of times; shutdown does it once more."""
        self.model_runner.save_measurements()

    def get_model(self) -> nn.Module:
        return self.model_runner.get_model()

    def get_draft_model(self) -> nn.Module | None:
        return self.model_runner.get_draft_model()

    def synchronize_device(self) -> None:
        self.backend.memory.synchronize()

    def reset_encoder_cache(self) -> None:
        """A no-op: there is no encoder."""

    def shutdown(self) -> None:
        if getattr(self, "model_runner", None) is not None:
            if getattr(self.model_runner, "target", None) is not None:
                self.model_runner.save_measurements()
            clear_layer_kv_caches(self.compilation_config.static_forward_context.values())
            del self.model_runner
            gc.collect()
