"""Patches for ranks and experts still have their reasons: these fail when upstream moves; then review the patch."""

import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.devices.common.experts import route


def test_layers_still_ask_the_module_for_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream keeps a process's group elsewhere: then a drafter would be cut as its target is."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, parallel_state

    target, alone = (SimpleNamespace(world_size=size, rank_in_group=size - 1) for size in (2, 1))
    monkeypatch.setattr(parallel_state, "_TP", target)
    with upstream.tensor_parallel_group(alone):
        assert (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()) == (1, 0)
        with upstream.tensor_parallel_group(target):
            assert get_tensor_model_parallel_world_size() == 2
        assert get_tensor_model_parallel_world_size() == 1
    assert (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()) == (2, 1)
    with pytest.raises(ZeroDivisionError), upstream.tensor_parallel_group(alone):
        1 / 0  # noqa: B018
    assert get_tensor_model_parallel_world_size() == 2


def test_cpu_experts_of_other_ranks_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's kernel is given the map of a rank's experts: then the patch can go."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    seen: list[tuple[list[list[float]], list[list[int]]]] = []

    def kernel(output: Any, hidden: Any, w1: Any, w2: Any, b1: Any, b2: Any, weights: Any, ids: Any, *_: Any) -> None:
        seen.append((weights.tolist(), ids.tolist()))

    monkeypatch.setattr(cpu_moe, "cpu_fused_moe", kernel)
    given: dict[str, Any] = dict.fromkeys(inspect.signature(cpu_moe.CPUUnquantizedExperts.apply).parameters)
    experts = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")
    given = {name: value for name, value in given.items() if name != "self"} | dict(
        activation=SimpleNamespace(value="silu"),
        topk_weights=torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
        topk_ids=torch.tensor([[3, 0], [1, 2]], dtype=torch.int32),
        expert_map=torch.tensor([-1, -1, 0, 1], dtype=torch.int32),
    )
    original = inspect.unwrap(cpu_moe.CPUUnquantizedExperts.apply)
    original(experts, **given)
    assert seen.pop()[1] == [[3, 0], [1, 2]], "upstream reads experts that are not there"
    monkeypatch.setattr(cpu_moe.CPUUnquantizedExperts, "apply", original)
    upstream.assign_cpu_experts()
    cpu_moe.CPUUnquantizedExperts.apply(experts, **given)
    assert seen.pop() == ([[0.75, 0.0], [0.0, 0.5]], [[1, 0], [0, 0]])
    cpu_moe.CPUUnquantizedExperts.apply(experts, **(given | dict(expert_map=None)))
    assert seen.pop() == ([[0.75, 0.25], [0.5, 0.5]], [[3, 0], [1, 2]])


def test_upstreams_ray_executor_still_counts_cards() -> None:
    """Fails when it can be told the class of its workers, or asks nothing of Ray about a CPU: then these can go."""
    from vllm.v1.executor import ray_executor_v2

    from vllm_gaudi_spec.devices.cpu.ray import CpuRayExecutor, CpuRayWorker

    assert "ray.remote(RayWorkerProc)" in inspect.getsource(ray_executor_v2.RayExecutorV2._init_executor)
    assert "get_accelerator_ids()[device_key]" in inspect.getsource(
        ray_executor_v2.RayWorkerProc.get_node_and_physical_gpu_ids
    )
    theirs = ray_executor_v2.RayWorkerProc
    with upstream.ray_workers(CpuRayWorker):
        assert ray_executor_v2.RayWorkerProc is CpuRayWorker
    assert ray_executor_v2.RayWorkerProc is theirs
    assert issubclass(CpuRayExecutor, ray_executor_v2.RayExecutorV2)
    assert CpuRayExecutor._get_actor_resource_kwargs() == {"num_gpus": 0}


def test_queues_between_ranks_listen_at_the_address_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's queues between ranks get the address that Ray has for a node: then this can go."""
    import ray
    from vllm.utils.network_utils import get_ip

    from vllm_gaudi_spec.upstream.ray import use_node_address

    assert "connect_ip = get_ip()" in inspect.getsource(MessageQueue.__init__)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")  # so that it is as it was when the test ends
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    use_node_address()
    assert get_ip() == "10.0.0.7", "the user's choice"
    monkeypatch.delenv("VLLM_HOST_IP")
    use_node_address()
    assert get_ip() == "10.0.0.2"


def test_reads_from_other_machines_end_when_their_queue_is_shut_down() -> None:
    """Fails when upstream's reads do so by themselves: then the patch can go."""
    upstream.end_reads_from_other_machines()
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(writer.wait_until_ready)
        reader.wait_until_ready()
        ready.result()
        writer.enqueue("first")
        assert reader.dequeue(timeout=10) == "first"
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.01)
        late = pool.submit(reader.dequeue, timeout=30)
        reader.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            late.result(timeout=10)
    with pytest.raises(TimeoutError):  # in vain, as it was shut down
        inspect.unwrap(MessageQueue.dequeue)(reader, timeout=0.2)


def test_failed_engine_waits_for_the_name_of_the_dead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's monitor of Ray workers is no thread of this name that ends with a rank: then review it."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    happened: list[str] = []
    monkeypatch.setattr(EngineCoreProc, "_send_engine_dead", lambda engine: happened.append("clients are told"))
    upstream.name_dead_ranks()
    referable = type("Executor", (SimpleNamespace,), {})
    executor: Any = referable(ray_worker_handles=[SimpleNamespace(run_ref="ref", rank=1)], shutting_down=False)
    executor.shutdown, executor.failure_callback = lambda: happened.append("a rank died"), None
    ray = SimpleNamespace(is_initialized=lambda: True, wait=lambda refs, **_: (time.sleep(0.3), (refs, []))[1])
    monkeypatch.setattr("vllm.v1.executor.ray_executor_v2.ray", ray)
    RayExecutorV2.start_worker_monitor(executor)
    EngineCoreProc._send_engine_dead(SimpleNamespace(model_executor=executor))
    EngineCoreProc._send_engine_dead(SimpleNamespace(model_executor=object()))
    assert happened == ["a rank died", "clients are told", "clients are told"]


TOKENS, EXPERTS, TOP_K = 5, 8, 3


def test_cpu_experts_are_scored_by_sigmoid_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's router does so by itself: then the patch can go."""
    torch.manual_seed(0)
    logits_TE, bias_E = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
    sizes = dict(top_k=TOP_K, global_num_experts=EXPERTS, scoring_func="sigmoid", e_score_correction_bias=bias_E)
    monkeypatch.setattr(CPURouter, "__init__", inspect.unwrap(CPURouter.__init__))
    with pytest.raises(AssertionError):
        CPURouter(**sizes)._compute_routing(logits_TE, logits_TE, None)
    upstream.score_cpu_experts_by_sigmoid()
    weights_TK, ids_TK = CPURouter(**sizes)._compute_routing(logits_TE, logits_TE, None)
    found_TE = torch.zeros(TOKENS, EXPERTS).scatter(1, ids_TK.long(), weights_TK)
    expected_TE = route(logits_TE, top_k=TOP_K, scoring="sigmoid", renormalize=True, bias_E=bias_E)
    torch.testing.assert_close(found_TE, expected_TE)
    softmax = CPURouter(**sizes | dict(scoring_func="softmax", e_score_correction_bias=None))
    assert not softmax.use_grouped_topk
