"""The printed output of graph-check, and its conclusion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_SHOWN = 12
_NOT_COUNTED = "not counted on this device"


def findings(result: dict[str, Any]) -> list[str]:
    """What makes the exit status 1, one line each, with the lines of source that caused it."""
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
