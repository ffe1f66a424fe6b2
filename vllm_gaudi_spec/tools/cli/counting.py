"""The figures of graph-check, counted from the worker's reports, compared with what is allowed, and printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_gaudi_spec.config import GAUDIS

# The key under which the emulated card reports beside what a real one counts too.
EMULATOR = "emulator"

Event = tuple[str, str, str]
Line = dict[str, Any]
"""count, what, where"""


def emulated(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the emulated card's part of a worker's report, or None on a real card."""
    part = report["device"].get(EMULATOR)
    return part if isinstance(part, dict) else None


def total_compiles(report: dict[str, Any]) -> int | None:
    """Return the graphs compiled since the process began, by habana_frameworks or the backend."""
    device = report["device"]
    if (captured := device.get("captured")) is not None:
        return sum(captured.values())
    return _metric(device, "graph_compilation")


def total_fallbacks(report: dict[str, Any]) -> int | None:
    return _metric(report["device"], "cpu_fallback")


def _metric(device: dict[str, Any], name: str) -> int | None:
    number = device.get(name, {}).get("TotalNumber")
    return None if number is None else int(number)


def recorded_syncs(report: dict[str, Any]) -> int:
    """Return the device-to-host syncs that the runner counts."""
    return round(report["host_syncs_per_step"] * report["steps"])


class Meter:
    """Collects the worker's reports: the emulated card keeps a limited number of steps."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.first = self.last = first
        self.steps: list[dict[str, int]] = []

    def look(self, report: dict[str, Any]) -> None:
        before, after = emulated(self.last), emulated(report)
        if before is not None and after is not None:
            new = after["num_steps"] - before["num_steps"]
            if new > len(after["steps"]):
                raise RuntimeError(f"{new} steps passed since the last look, of which {len(after['steps'])} were kept")
            self.steps += after["steps"][len(after["steps"]) - new :]
        self.last = report


@dataclass(kw_only=True)
class Phase:
    """The counts of one part of the workload; None where the device does not count."""

    steps: int
    compiles: int | None
    compile_lines: list[Line] = field(default_factory=list)
    runner_syncs: int
    """Device-to-host syncs that the runner counts, on every device."""
    host_syncs: int | None = None
    max_syncs_in_a_step: int | None = None
    steps_by_syncs: dict[int, int] = field(default_factory=dict)
    """Number of device-to-host syncs of a step -> number of such steps."""
    sync_lines: list[Line] = field(default_factory=list)
    dynamic_ops: int | None = None
    dynamic_lines: list[Line] = field(default_factory=list)
    fallbacks: int | None = None
    fallback_lines: list[Line] = field(default_factory=list)
    garbage_reads: int | None = None
    upload_bytes: int | None = None
    download_bytes: int | None = None
    kv_bytes_read: int | None = None
    estimate_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean, median and longest step by generation of Gaudi, computed and not measured."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def phase(meter: Meter) -> Phase:
    first, last = meter.first, meter.last
    found = Phase(
        steps=last["steps"] - first["steps"],
        compiles=_less(total_compiles(last), total_compiles(first)),
        fallbacks=_less(total_fallbacks(last), total_fallbacks(first)),
        runner_syncs=recorded_syncs(last) - recorded_syncs(first),
    )
    before, after = emulated(first), emulated(last)
    if before is None or after is None:
        return found
    amounts = {name: after["total"][name] - before["total"][name] for name in after["total"]}
    new = new_events(before["events"], after["events"])
    # What comes after the end of the last step, such as a drafter on the host, is in no step's record.
    syncs = [step["host_reads"] for step in meter.steps]
    syncs.append(amounts["host_reads"] - sum(syncs))
    found.compiles = amounts["compiles"]
    found.compile_lines = lines(new, "compile after warm-up")
    found.host_syncs = amounts["host_reads"]
    found.max_syncs_in_a_step = max(syncs)
    found.steps_by_syncs = dict(sorted(Counter(syncs).items()))
    found.sync_lines = lines(new, "device-to-host sync")
    found.dynamic_ops = amounts["dynamic_ops"]
    found.dynamic_lines = lines(new, "dynamic op")
    found.fallbacks = amounts["fallbacks"]
    found.fallback_lines = lines(new, "CPU fallback")
    found.garbage_reads = amounts["garbage_reads"]
    found.upload_bytes = amounts["upload_bytes"]
    found.download_bytes = amounts["download_bytes"]
    found.kv_bytes_read = amounts["kv_bytes_read"]
    if after["estimate"] is not None:
        found.estimate_seconds = {generation: estimate(meter.steps, generation) for generation in GAUDIS}
    return found


def _less(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else last - first


def new_events(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Counter[Event]:
    def counted(events: Sequence[dict[str, Any]]) -> Counter[Event]:
        return Counter({(event["kind"], event["what"], event["where"]): event["count"] for event in events})

    return counted(after) - counted(before)


def lines(events: Counter[Event], kind: str) -> list[Line]:
    """Return the source lines of events of this kind, most frequent first."""
    return [
        {"count": count, "what": what, "where": where}
        for (its_kind, what, where), count in events.most_common()
        if its_kind == kind
    ]


def estimate(steps: Sequence[dict[str, int]], generation: str) -> dict[str, float]:
    """Return estimated seconds of a step."""
    from card_emulator.cost import step_seconds
    from card_emulator.counters import Tally

    names = Tally.__dataclass_fields__
    seconds = sorted(
        step_seconds(Tally(**{name: step[name] for name in names if name in step}), generation) for step in steps
    )
    if not seconds:
        return {}
    return {"mean": sum(seconds) / len(seconds), "median": seconds[len(seconds) // 2], "longest": seconds[-1]}


def graphs(warm: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """Compare the graphs of warm-up with those that the workload used."""
    found: dict[str, Any] = {
        "signatures": warm["graphs"]["warmup"],
        "listed": warm["graphs"]["listed"],
        "unexpected": last["graphs"]["unexpected"],
        "compiles_until_ready": total_compiles(warm),
        "captured": None,
        "never_used": None,
        "by_name": {},
    }
    before, after = emulated(warm), emulated(last)
    if before is None or after is None:
        return found
    made = before["graphs"]
    used = [now["replays"] > then["replays"] for then, now in zip(made, after["graphs"][: len(made)], strict=True)]
    by_name: dict[str, dict[str, int]] = {}
    for record, is_used in zip(made, used, strict=True):
        counts = by_name.setdefault(record["name"], {"captured": 0, "never_used": 0})
        counts["captured"] += 1
        counts["never_used"] += not is_used
    found |= {"captured": len(made), "never_used": len(made) - sum(used), "by_name": by_name}
    return found


# ---- what is printed ---------------------------------------------------------------------------------------


_SHOWN = 12
_NOT_COUNTED = "not counted on this device"


def findings(result: dict[str, Any]) -> list[str]:
    """Return the findings that fail the check, one line each, with the source lines that caused them."""
    found = []
    for title, phase in result["phases"].items():
        if phase["compiles"]:
            origin = _at(phase["compile_lines"])
            found.append(f"compiled after warm-up, in the {title} phase: {phase['compiles']} graphs{origin}")
    if unexpected := result["graphs"]["unexpected"]:
        found.append(f"{len(unexpected)} step signatures were not part of the warm-up: {', '.join(unexpected)}")
    mixed = result["phases"]["mixed"]
    max_syncs = result["settings"]["host_syncs"]
    if above := sum(steps for syncs, steps in mixed["steps_by_syncs"].items() if syncs > max_syncs):
        found.append(
            f"{above} of {mixed['steps']} steps have more than {_syncs(max_syncs)}, one of them "
            f"{mixed['max_syncs_in_a_step']}{_at(mixed['sync_lines'])}"
        )
    elif mixed["host_syncs"] is None and mixed["runner_syncs"] > max_syncs * mixed["steps"]:
        found.append(f"the runner made {_syncs(mixed['runner_syncs'])} in {mixed['steps']} steps")
    return found


def _syncs(number: int) -> str:
    return f"{number} device-to-host sync{'s' if number != 1 else ''}"


def _at(lines: Sequence[dict[str, Any]]) -> str:
    sources = list(dict.fromkeys(line["where"] for line in lines))
    more = f" and {len(sources) - 3} more lines" if len(sources) > 3 else ""
    return f": {'; '.join(sources[:3])}{more}" if sources else ""


def conclusion(result: dict[str, Any]) -> str:
    if result["findings"]:
        return "\n".join(f"not clean: {line}" for line in result["findings"])
    syncs = _syncs(result["settings"]["host_syncs"])
    if result["phases"]["mixed"]["host_syncs"] is None:
        return f"clean: nothing was compiled after warm-up, and the runner makes at most {syncs} per step"
    # Those of prompt log-probabilities have a phase of their own, and may.
    return f"clean: nothing was compiled after warm-up, and no step of the mixed requests has more than {syncs}"


def table(result: dict[str, Any]) -> str:
    rows = [*_head(result), *_graph_rows(result["graphs"])]
    for title, phase in result["phases"].items():
        rows += [("", ""), (f"[{title}]", ""), *_phase_rows(phase)]
    width = max(len(name) for name, text in rows if text)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _head(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    settings, traffic = result["settings"], result["traffic"]
    yield "model", settings["model"]
    yield "speculation", settings["speculation"]
    yield "device", f"{result['device']}, mode {result['mode']}, {result['dtype']}"
    yield (
        "workload",
        f"{traffic['requests']} requests, {traffic['aborted']} of them aborted, {traffic['tokens']} tokens out",
    )
    yield (
        "settings",
        ", ".join(f"{name.replace('_', ' ')} {settings[name]}" for name in ("max_model_len", "max_num_seqs", "seed")),
    )


def _graph_rows(graphs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "step signatures in warm-up", f"{graphs['signatures']} of {graphs['listed']} listed"
    if graphs["captured"] is None:
        yield "graphs compiled until ready", _count(graphs["compiles_until_ready"])
        return
    yield "graphs captured in warm-up", f"{graphs['captured']}, of which {graphs['never_used']} never used here"
    for name, counts in sorted(graphs["by_name"].items()):
        yield f"  {name.rpartition('.')[2]}", f"{counts['captured']}, {counts['never_used']} never used"


def _phase_rows(phase: dict[str, Any]) -> Iterator[tuple[str, str]]:
    steps = phase["steps"]
    yield "steps", str(steps)
    yield "compiles after warm-up", _count(phase["compiles"])
    yield from _source_lines(phase["compile_lines"])
    if phase["host_syncs"] is None:
        per_step = phase["runner_syncs"] / max(steps, 1)
        yield "device-to-host syncs per step", f"{per_step:.2f} by the runner; others are {_NOT_COUNTED}"
    else:
        largest = f"{phase['max_syncs_in_a_step']} at most"
        yield "device-to-host syncs per step", f"{phase['host_syncs'] / max(steps, 1):.2f}, {largest}"
        yield from _source_lines(phase["sync_lines"])
    yield "dynamic ops", _count(phase["dynamic_ops"])
    yield from _source_lines(phase["dynamic_lines"])
    yield "CPU fallbacks", _count(phase["fallbacks"])
    yield from _source_lines(phase["fallback_lines"])
    if phase["garbage_reads"]:
        yield "values that warm-up never made", str(phase["garbage_reads"])
    yield "bytes over PCIe per step", _traffic(phase)
    yield "KV bytes read per step", _bytes(phase["kv_bytes_read"], steps)
    for generation, seconds in phase["estimate_seconds"].items():
        if seconds:
            words = (f"{name} {seconds[name] * 1e3:.3f} ms" for name in ("mean", "median", "longest"))
            yield f"estimate of a step, {generation}", ", ".join(words)


def _source_lines(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for line in lines[:_SHOWN]:
        yield f"  {line['count']:>6} x {line['what']} at {line['where']}", ""
    if len(lines) > _SHOWN:
        yield f"  and {len(lines) - _SHOWN} more lines; --json has them all", ""


def _count(number: int | None) -> str:
    return _NOT_COUNTED if number is None else str(number)


def _bytes(number: int | None, steps: int) -> str:
    return _NOT_COUNTED if number is None else f"{number / max(steps, 1):,.0f}"


def _traffic(phase: dict[str, Any]) -> str:
    if phase["upload_bytes"] is None:
        return _NOT_COUNTED
    return f"{_bytes(phase['upload_bytes'], phase['steps'])} up, {_bytes(phase['download_bytes'], phase['steps'])} down"
