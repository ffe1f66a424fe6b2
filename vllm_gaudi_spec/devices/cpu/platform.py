"""The CPU platform class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import CpuArchEnum, Platform

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import Options
from vllm_gaudi_spec.environment import (
    choose_start_method,
    keeps_engine_in_process,
    kv_cache_space_gib,
    leave_threads_unbound,
    preload_openmp,
)
from vllm_gaudi_spec.platforms.base import SpecPlatform
from vllm_gaudi_spec.upstream.platforms import CpuPlatform, get_visible_memory_node, resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.upstream.platforms import FlexibleArgumentParser

_CPU_RAY_EXECUTOR = "vllm_gaudi_spec.devices.cpu.ray.CpuRayExecutor"


class CpuSpecPlatform(SpecPlatform, CpuPlatform):
    """The CPU platform.

    This class derives from vLLM's CPU platform, so that `is_cpu()` is true. vLLM then packs linear weights for oneDNN,
    uses its C++ kernels for activations, rotary embeddings, and MoE, and does not call accelerator functions.
    """

    # Do not compile vLLM's helper functions: their operations are too small to benefit, and Inductor takes seconds.
    simple_compile_backend = "eager"
    ray_device_key = "CPU"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        if self.get_cpu_architecture() == CpuArchEnum.X86 and not _has_native_bfloat16():
            return [torch.float32]
        return super().supported_dtypes

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Turn off async scheduling by default for servers.

        Async scheduling returns each token one step later. On a CPU, it does not increase throughput, because a step
        and the scheduling of the next step use the same cores.
        """
        super().pre_register_and_update(parser)
        if parser is not None:
            parser.set_defaults(async_scheduling=False)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm_gaudi_spec.devices.cpu import fork as cpu_fork
        from vllm_gaudi_spec.devices.cpu import linear as cpu_linear

        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        num_ranks = parallel.local_world_size * parallel.data_parallel_size_local
        if num_ranks > len(get_visible_memory_node()):
            leave_threads_unbound()
        if parallel.distributed_executor_backend == "ray":
            executor: Any = resolve_obj_by_qualname(_CPU_RAY_EXECUTOR)
            parallel.distributed_executor_backend = executor
        cpu_linear.refuse_missing_kernel(Options.from_vllm(vllm_config))
        if (space := kv_cache_space_gib()) is not None:
            vllm_config.cache_config.kv_cache_memory_bytes = space << 30
        if not keeps_engine_in_process():
            preload_openmp()
        choose_start_method(lambda: cpu_fork.start_method(num_ranks))

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_gaudi_spec.devices.cpu.communicator.CpuSpecCommunicator"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """No-op: vLLM's method overrides kernels of its own runner and sampler, which are not used.

        vLLM's method searches all modules and raises an AttributeError on llvmlite functions, which Kimi Linear
        imports.
        """

    @classmethod
    def import_ir_kernels(cls) -> None:
        # Each worker calls this method before it loads a model.
        super().import_ir_kernels()
        from vllm_gaudi_spec.devices.cpu import linear as cpu_linear

        upstream.choose_cpu_linears(cpu_linear.pack)
        upstream.assign_cpu_experts()
        upstream.score_cpu_experts_by_sigmoid()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        # CpuPlatform does not set the block size; our attention backend determines it.
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)


def _has_native_bfloat16() -> bool:
    """Whether the CPU has bfloat16 instructions. Without them, bfloat16 is emulated and slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
