"""How ranks may be combined: what is let in, and what is refused in one line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig
from vllm.config import VllmConfig
from vllm.platforms import interface

from tests.full_tests.tiny_models import common
from tests.support.releases import only_0_32
from tests.unit.test_config import DRAFT, NGRAM, engine_config, here, start_method_stays  # noqa: F401
from vllm_gaudi_spec.config import UnsupportedConfigError, ranks_in_step
from vllm_gaudi_spec.devices.cpu.platform import CpuSpecPlatform
from vllm_gaudi_spec.devices.cuda.platform import CudaSpecPlatform


def with_experts(folder: Path, speculative: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    model = Qwen3MoeConfig(**common(**experts), architectures=["Qwen3MoeForCausalLM"])
    return engine_config(folder, speculative, model, **options)


TWO = dict(data_parallel_size=2)
SPREAD = dict(TWO, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TWO, "has experts, which data-parallel ranks have to share; add --enable-expert-parallel"),
        (dict(SPREAD, all2all_backend="deepep_low_latency"), "use allgather_reducescatter, which is the default"),
        (dict(SPREAD, speculative=DRAFT), "is a drafter with experts, which does not support data parallelism"),
    ],
    ids=str,
)
def test_experts_of_data_parallel_ranks(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "speculative" in options:
        options = options | dict(speculative=here(DRAFT, tmp_path))
    with pytest.raises(UnsupportedConfigError, match=message):
        with_experts(tmp_path, **options)


def test_what_is_let_in(tmp_path: Path) -> None:
    assert ranks_in_step(with_experts(tmp_path, NGRAM, **SPREAD)) == 2
    # A head without experts runs alone beside a target that has some.
    head: Any = SimpleNamespace(is_moe=False)
    assert ranks_in_step(with_experts(tmp_path, **SPREAD), head) == 1
    assert ranks_in_step(with_experts(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True)) == 1
    # Engines of a model without experts have nothing to do with each other.
    assert ranks_in_step(engine_config(tmp_path, None, **TWO)) == 1


def test_ray_on_cpus(tmp_path: Path) -> None:
    """A rank takes a CPU of Ray's, and starts on the device that the engine is for."""
    from vllm_gaudi_spec.devices.cpu.ray import CpuRayExecutor

    made = engine_config(tmp_path, None, tensor_parallel_size=2, distributed_executor_backend="ray").parallel_config
    assert made.distributed_executor_backend is CpuRayExecutor
    assert made.use_ray
    assert made.ray_runtime_env == {"env_vars": {"VGS_DEVICE": "cpu"}}
    assert CpuSpecPlatform.ray_device_key == "CPU"


@only_0_32
def test_the_older_executor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches through the worker for upstream's own runner."""
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(UnsupportedConfigError, match="unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND"):
        engine_config(tmp_path, None, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_the_card_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gaudi's process has one card; what vLLM assigned is for platforms whose processes see all."""
    assert CpuSpecPlatform.find_card(1, None) == CpuSpecPlatform.find_card(1, [4, 6]) == 1
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert CudaSpecPlatform.find_card(1, None) == 1
    assert CudaSpecPlatform.find_card(1, [4, 6]) == 2


def test_a_card_for_each_rank() -> None:
    CudaSpecPlatform._check_device_ids([3, 1], 2)
    with pytest.raises(UnsupportedConfigError, match="--device-ids names 1 cards for 2 ranks; name one for each"):
        CudaSpecPlatform._check_device_ids([3], 2)


def test_device_ids_without_effect_are_refused(tmp_path: Path) -> None:
    """An engine served on other cards than the user had named."""
    with pytest.raises(UnsupportedConfigError, match="--device-ids has no effect on cpu; leave it out, and set CPU_"):
        engine_config(tmp_path, None, device_ids=[1])
    made = engine_config(tmp_path, None)
    # As in an engine's process, to whose rank vLLM has assigned cards.
    made.parallel_config.assigned_physical_gpu_ids = [1]
    CpuSpecPlatform.check_and_update_config(made)
    # As in one of the servers that vLLM's supervisor of data-parallel servers starts, with cards for each.
    made.parallel_config.worker_cls, made.parallel_config.data_parallel_external_lb = "auto", True
    CpuSpecPlatform.check_and_update_config(made)
    assert made.parallel_config.worker_cls != "auto"
