"""Computes the figures of graph-check from the worker's reports, compares them with limits, and prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Event = tuple[str, str, str]
Line = dict[str, Any]
"""A dictionary with the keys `count`, `what`, and `where`."""


def find_emulated(report: dict[str, Any]) -> dict[str, Any] | None:
    """Return the part of a worker's report about the emulated card, or None on a real card."""
    part = report["device"].get("emulator")
    return part if isinstance(part, dict) else None


def count_compiles(report: dict[str, Any]) -> int | None:
    """Return the number of graphs compiled since the process started, as counted by the bridge or the backend."""
    if (captured := report["device"].get("captured")) is not None:
        return sum(captured.values())
    return _read_metric(report, "graph_compilation")


def _read_metric(report: dict[str, Any], name: str) -> int | None:
    number = report["device"].get(name, {}).get("TotalNumber")
    return None if number is None else int(number)


class Meter:
    """Reports of the worker, collected repeatedly because the emulated card keeps a limited number of steps."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.first = self.last = first
        self.steps: list[dict[str, int]] = []

    def look(self, report: dict[str, Any]) -> None:
        before, after = find_emulated(self.last), find_emulated(report)
        if before is not None and after is not None:
            new = after["num_steps"] - before["num_steps"]
            if new > len(after["steps"]):
                raise RuntimeError(f"{new} steps passed since the last look, but only {len(after['steps'])} were kept")
            self.steps += after["steps"][len(after["steps"]) - new :]
        self.last = report


def count_phase(meter: Meter) -> dict[str, Any]:
    """Return the counts for one phase of the workload. Values that the device does not count are None or empty."""
    first, last = meter.first, meter.last
    # The runner counts its own device-to-host syncs on every device.
    first_syncs, last_syncs = (round(report["host_syncs_per_step"] * report["steps"]) for report in (first, last))
    found: dict[str, Any] = {
        "steps": last["steps"] - first["steps"],
        "compiles": _subtract(count_compiles(last), count_compiles(first)),
        "compile_lines": [],
        "runner_syncs": last_syncs - first_syncs,
        "host_syncs": None,
        "max_syncs_in_a_step": None,
        "steps_by_syncs": {},  # maps a number of syncs per step to the number of such steps
        "sync_lines": [],
        "dynamic_ops": None,
        "dynamic_lines": [],
        "fallbacks": _subtract(_read_metric(last, "cpu_fallback"), _read_metric(first, "cpu_fallback")),
        "fallback_lines": [],
        **dict.fromkeys(("garbage_reads", "upload_bytes", "download_bytes", "kv_bytes_read")),
    }
    before, after = find_emulated(first), find_emulated(last)
    if before is None or after is None:
        return found
    amounts = {name: after["total"][name] - before["total"][name] for name in after["total"]}
    events = _count_events(after["events"]) - _count_events(before["events"])
    # Syncs after the last step, such as those of a host drafter, are not part of any step's record.
    syncs = [step["host_reads"] for step in meter.steps]
    syncs.append(amounts["host_reads"] - sum(syncs))
    found |= {name: amounts[name] for name in found.keys() & amounts.keys()}
    found |= {
        "compile_lines": _list_lines(events, "compile after warm-up"),
        "host_syncs": amounts["host_reads"],
        "max_syncs_in_a_step": max(syncs),
        "steps_by_syncs": dict(sorted(Counter(syncs).items())),
        "sync_lines": _list_lines(events, "device-to-host sync"),
        "dynamic_lines": _list_lines(events, "dynamic op"),
        "fallback_lines": _list_lines(events, "CPU fallback"),
    }
    return found


def _subtract(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else last - first


def _count_events(events: Sequence[dict[str, Any]]) -> Counter[Event]:
    return Counter({(event["kind"], event["what"], event["where"]): event["count"] for event in events})


def _list_lines(events: Counter[Event], kind: str) -> list[Line]:
    """Return the source lines of events of this kind, most frequent first."""
    return [
        {"count": count, "what": what, "where": where}
        for (its_kind, what, where), count in events.most_common()
        if its_kind == kind
    ]


def count_graphs(warm: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """Compare the graphs created in warm-up with those that the workload used."""
    found: dict[str, Any] = {
        "signatures": warm["graphs"]["warmup"],
        "listed": warm["graphs"]["listed"],
        "unexpected": last["graphs"]["unexpected"],
        "compiles_until_ready": count_compiles(warm),
        "captured": None,
        "never_used": None,
        "by_name": {},
    }
    before, after = find_emulated(warm), find_emulated(last)
    if before is None or after is None:
        return found
    made = before["graphs"]
    by_name: dict[str, dict[str, int]] = {}
    for then, now in zip(made, after["graphs"][: len(made)], strict=True):
        counts = by_name.setdefault(then["name"], {"captured": 0, "never_used": 0})
        counts["captured"] += 1
        counts["never_used"] += now["replays"] <= then["replays"]
    never_used = sum(counts["never_used"] for counts in by_name.values())
    return found | {"captured": len(made), "never_used": never_used, "by_name": by_name}


# ---- printed output ----------------------------------------------------------------------------------------


_MAX_LINES = 12
_NOT_COUNTED = "not counted on this device"


def find_faults(result: dict[str, Any]) -> list[str]:
    """Return the findings for which the check fails, one line each, with the source lines that caused them."""
    found = []
    for title, phase in result["phases"].items():
        if phase["compiles"]:
            origin = _name_origin(phase["compile_lines"])
            found.append(f"compiled after warm-up, in the {title} phase: {phase['compiles']} graphs{origin}")
    if unexpected := result["graphs"]["unexpected"]:
        found.append(f"{len(unexpected)} step signatures were not part of the warm-up: {', '.join(unexpected)}")
    mixed, max_syncs = result["phases"]["mixed"], result["settings"]["host_syncs"]
    if above := sum(steps for syncs, steps in mixed["steps_by_syncs"].items() if syncs > max_syncs):
        found.append(
            f"{above} of {mixed['steps']} steps have more than {_syncs(max_syncs)}, one of them "
            f"{mixed['max_syncs_in_a_step']}{_name_origin(mixed['sync_lines'])}"
        )
    elif mixed["host_syncs"] is None and mixed["runner_syncs"] > max_syncs * mixed["steps"]:
        found.append(f"the runner made {_syncs(mixed['runner_syncs'])} in {mixed['steps']} steps")
    return found


def _syncs(number: int) -> str:
    return f"{number} device-to-host sync{'s' if number != 1 else ''}"


def _name_origin(lines: Sequence[Line]) -> str:
    sources = list(dict.fromkeys(line["where"] for line in lines))
    more = f" and {len(sources) - 3} more lines" if len(sources) > 3 else ""
    return f": {'; '.join(sources[:3])}{more}" if sources else ""


def conclude(result: dict[str, Any]) -> str:
    if result["findings"]:
        return "\n".join(f"not clean: {line}" for line in result["findings"])
    syncs = _syncs(result["settings"]["host_syncs"])
    if result["phases"]["mixed"]["host_syncs"] is None:
        return f"clean: nothing was compiled after warm-up, and the runner makes at most {syncs} per step"
    # Prompt log-probabilities may need more syncs, so they have a separate phase.
    return f"clean: nothing was compiled after warm-up, and no step of the mixed requests has more than {syncs}"


def make_table(result: dict[str, Any]) -> str:
    settings, traffic = result["settings"], result["traffic"]
    rows = [
        ("model", settings["model"]),
        ("speculation", settings["speculation"]),
        ("device", f"{result['device']}, mode {result['mode']}, {result['dtype']}"),
        ("workload", "{requests} requests, of which {aborted} were aborted, {tokens} output tokens".format(**traffic)),
        ("settings", "max model len {max_model_len}, max num seqs {max_num_seqs}, seed {seed}".format(**settings)),
        *_make_graph_rows(result["graphs"]),
    ]
    for title, phase in result["phases"].items():
        rows += [("", ""), (f"[{title}]", ""), *_make_phase_rows(phase)]
    width = max(len(name) for name, text in rows if text)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def _make_graph_rows(graphs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "step signatures in warm-up", f"{graphs['signatures']} of {graphs['listed']} listed"
    if graphs["captured"] is None:
        yield "graphs compiled until ready", _count(graphs["compiles_until_ready"])
        return
    yield "graphs captured in warm-up", f"{graphs['captured']}, of which {graphs['never_used']} were not used"
    for name, counts in sorted(graphs["by_name"].items()):
        yield f"  {name.rpartition('.')[2]}", f"{counts['captured']}, of which {counts['never_used']} were not used"


def _make_phase_rows(phase: dict[str, Any]) -> Iterator[tuple[str, str]]:
    steps = max(phase["steps"], 1)

    def per_step(name: str) -> str:
        return _NOT_COUNTED if phase[name] is None else f"{phase[name] / steps:,.0f}"

    yield "steps", str(phase["steps"])
    yield "compiles after warm-up", _count(phase["compiles"])
    yield from _make_line_rows(phase["compile_lines"])
    if phase["host_syncs"] is None:
        text = f"{phase['runner_syncs'] / steps:.2f} by the runner; others are {_NOT_COUNTED}"
    else:
        text = f"{phase['host_syncs'] / steps:.2f}, at most {phase['max_syncs_in_a_step']}"
    yield "device-to-host syncs per step", text
    yield from _make_line_rows(phase["sync_lines"])
    yield "dynamic ops", _count(phase["dynamic_ops"])
    yield from _make_line_rows(phase["dynamic_lines"])
    yield "CPU fallbacks", _count(phase["fallbacks"])
    yield from _make_line_rows(phase["fallback_lines"])
    if phase["garbage_reads"]:
        yield "reads of uninitialized values", str(phase["garbage_reads"])
    yield "bytes uploaded per step", per_step("upload_bytes")
    yield "bytes downloaded per step", per_step("download_bytes")
    yield "KV bytes read per step", per_step("kv_bytes_read")


def _make_line_rows(lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    for line in lines[:_MAX_LINES]:
        yield f"  {line['count']:>6} x {line['what']} at {line['where']}", ""
    if len(lines) > _MAX_LINES:
        yield f"  and {len(lines) - _MAX_LINES} more lines; --json has them all", ""


def _count(number: int | None) -> str:
    return _NOT_COUNTED if number is None else str(number)
