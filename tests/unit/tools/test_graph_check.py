"""graph-check without an engine: its workload, its counts and its conclusion."""

from collections.abc import Sequence
from typing import Any

from vllm_gaudi_spec.tools.graph_check import counting

AMOUNTS = ("host_reads", "dynamic_ops", "fallbacks", "garbage_reads", "upload_bytes", "download_bytes", "kv_bytes_read")


def tally(compiles: int = 0, **amounts: int) -> dict[str, int]:
    return {"compiles": compiles, "lazy_compiles": compiles, **dict.fromkeys(AMOUNTS, 0), **amounts}


def report(
    steps: Sequence[dict[str, int]], events: dict[tuple[str, str, str], int] | None = None, after_steps: int = 0
) -> dict[str, Any]:
    """A worker's report on the emulated card after a warm-up of two graphs; `after_steps`: syncs after the last one."""
    total = {name: sum(step[name] for step in steps) for name in tally()}
    total["host_reads"] += after_steps
    names = ("kind", "what", "where")
    graphs = [
        {"name": "Runner._forward", "replays": len(steps)},
        {"name": "Runner._forward", "replays": 0},
        {"name": "Runner._finish", "replays": len(steps)},
    ]
    emulated = {
        "total": total,
        "num_steps": len(steps),
        "steps": list(steps)[-4:],
        "events": [{**dict(zip(names, key, strict=True)), "count": count} for key, count in (events or {}).items()],
        "graphs": graphs,
    }
    return real_report(len(steps), total["compiles"], emulated=emulated)


def real_report(steps: int, compiles: int, **more: Any) -> dict[str, Any]:
    metrics = {"graph_compilation": {"TotalNumber": 7 + compiles}, "cpu_fallback": {"TotalNumber": 0}}
    device = {**metrics, **({"emulator": more["emulated"]} if more else {})}
    return {
        "graphs": {"warmup": 5, "listed": 6, "after_warmup": 0, "unexpected": []},
        "steps": steps,
        "host_syncs_per_step": 1.0,
        "device": device,
    }


def result_after(*looks: dict[str, Any], first: dict[str, Any] | None = None) -> dict[str, Any]:
    meter = counting.Meter(first or report([]))
    for look in looks:
        meter.look(look)
    result: dict[str, Any] = {
        "device": "hpu-emulated",
        "mode": "lazy",
        "dtype": "float32",
        "settings": {
            "model": "m",
            "speculation": "none",
            "seed": 0,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "host_syncs": 1,
        },
        "traffic": {"requests": 3, "aborted": 1, "tokens": 20},
        "graphs": counting.count_graphs(meter.first, meter.last),
        "phases": {"mixed": counting.count_phase(meter)},
    }
    return {**result, "findings": counting.find_faults(result)}


READ = ("device-to-host sync", "copy to the host", "devices/hpu/backend.py:9 (start_download)")
GOOD = tally(host_reads=1, upload_bytes=100, kv_bytes_read=50)


def test_a_clean_run() -> None:
    result = result_after(report([GOOD] * 3, {READ: 3}), report([GOOD] * 6, {READ: 6}))
    mixed = result["phases"]["mixed"]
    assert (mixed["steps"], mixed["host_syncs"], mixed["max_syncs_in_a_step"], mixed["compiles"]) == (6, 6, 1, 0)
    assert (mixed["upload_bytes"], mixed["kv_bytes_read"]) == (600, 300)
    assert mixed["sync_lines"] == [{"count": 6, "what": READ[1], "where": READ[2]}]
    assert (result["graphs"]["captured"], result["graphs"]["never_used"]) == (3, 1)
    assert result["graphs"]["by_name"]["Runner._forward"] == {"captured": 2, "never_used": 1}
    assert result["findings"] == []
    conclusion = counting.conclude(result)
    assert conclusion.startswith("clean: ")
    assert conclusion.endswith("no step of the mixed requests has more than 1 device-to-host sync")
    table = [" ".join(line.split()) for line in counting.make_table(result).splitlines()]
    assert "graphs captured in warm-up 3, of which 1 were not used" in table
    assert "device-to-host syncs per step 1.00, at most 1" in table
    assert f"6 x {READ[1]} at {READ[2]}" in table


def test_a_compile_is_found_with_its_line() -> None:
    late = ("compile after warm-up", "sort, op 3 of 4", "my/drafter.py:12 (propose)")
    result = result_after(report([GOOD, tally(compiles=2, host_reads=1)], {READ: 2, late: 2}))
    (finding,) = result["findings"]
    assert finding == "compiled after warm-up, in the mixed phase: 2 graphs: my/drafter.py:12 (propose)"
    assert counting.conclude(result) == f"not clean: {finding}"
    assert "       2 x sort, op 3 of 4 at my/drafter.py:12 (propose)" in counting.make_table(result).splitlines()


def test_a_second_sync_is_found_with_its_line() -> None:
    item = ("device-to-host sync", "item", "my/drafter.py:14 (propose)")
    result = result_after(report([GOOD, tally(host_reads=3), GOOD], {READ: 3, item: 2}))
    (finding,) = result["findings"]
    assert "1 of 3 steps have more than 1 device-to-host sync, one of them 3" in finding
    assert "my/drafter.py:14 (propose)" in finding


def test_a_signature_outside_the_list_is_found() -> None:
    last = report([GOOD], {READ: 1})
    last["graphs"]["unexpected"] = ["Shape(decode, 9, 1, 2)"]
    assert "Shape(decode, 9, 1, 2)" in result_after(last)["findings"][0]


def test_a_card_counts_less() -> None:
    result = result_after(real_report(4, 0), first=real_report(0, 0))
    mixed = result["phases"]["mixed"]
    assert (mixed["steps"], mixed["compiles"], mixed["runner_syncs"]) == (4, 0, 4)
    assert mixed["host_syncs"] is mixed["kv_bytes_read"] is result["graphs"]["captured"] is None
    assert result["findings"] == []
    assert "not counted on this device" in counting.make_table(result)
    assert "the runner makes at most 1 device-to-host sync per step" in counting.conclude(result)
    found = result_after(real_report(4, 2), first=real_report(0, 0))["findings"]
    assert found == ["compiled after warm-up, in the mixed phase: 2 graphs"]
