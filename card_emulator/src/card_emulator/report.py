"""Reports of the card's counters, as a table for people and as JSON for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from card_emulator import cost

if TYPE_CHECKING:
    from card_emulator.ascend.cann.card import Card
    from card_emulator.card import Device
    from card_emulator.counters import Tally

# The maximum number of lines shown for each kind of event.
_SHOWN = 20


def as_json(device: Device | Card) -> dict[str, Any]:
    counters = device.counters
    total = counters.total
    free, limit = device.mem_get_info()
    steps = list(counters.steps)
    return {
        "device": device.generation,
        "lazy": device.lazy,
        "total": total.as_dict(),
        "num_steps": counters.num_steps,
        "steps": [step.as_dict() for step in steps],
        "events": [{**event._asdict(), "count": count} for event, count in counters.events.most_common()],
        "graphs": [asdict(record) for record in device.graphs],
        "graphs_held": device.graphs_held,
        "graph_recipes": len(device.graph_recipes),
        "memory": {"limit": limit, "in_use": device.in_use, "free": free, "graphs": device.graph_bytes},
        "estimate": _estimate(device.generation, steps, len(device.graph_recipes)),
    }


def _estimate(generation: str, steps: list[Tally], num_recipes: int) -> dict[str, Any] | None:
    """Return time estimates, or None if the card's published specifications are not sufficient for an estimate."""
    if generation not in cost.CARDS:
        return None
    return {
        "note": "estimate from counted bytes, operations and launches; not a measurement",
        "mean_step_seconds": (
            sum(cost.step_seconds(step, generation) for step in steps) / len(steps) if steps else None
        ),
        # Prefill recipes take longer to compile but are not distinguished here, so this value is a lower bound.
        "warmup_seconds_at_least": num_recipes * cost.RECIPE_SECONDS,
    }


def as_table(device: Device) -> str:
    report = as_json(device)
    mode = "lazy" if device.lazy else "eager"
    lines = [f"emulated {device.generation}, {mode} mode, {report['num_steps']} steps"]
    lines += [f"  {name:<18} {amount:>16,}" for name, amount in report["total"].items() if amount]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in report["events"]:
        by_kind.setdefault(event["kind"], []).append(event)
    for kind, events in sorted(by_kind.items()):
        lines.append(f"{kind}: {sum(event['count'] for event in events)}")
        lines += [f"  {event['count']:>8} x {event['what']} at {event['where']}" for event in events[:_SHOWN]]
        if len(events) > _SHOWN:
            lines.append(f"  and {len(events) - _SHOWN} more lines")
    if report["graphs"]:
        recipes = sum(graph["recipes"] for graph in report["graphs"])
        lines.append(
            f"graphs: {len(report['graphs'])} captured, {report['graphs_held']} still in memory, with {recipes} "
            f"recipes, {report['graph_recipes']} of them distinct"
        )
        lines += [
            f"  {graph['replays']:>8} replays of {graph['name']} [{graph['key']}], {graph['ops']} ops, "
            f"{graph['nbytes']:,} bytes, captured at {graph['where']}"
            for graph in report["graphs"]
        ]
    memory = report["memory"]
    lines.append(f"memory: {memory['in_use']:,} in use, {memory['graphs']:,} in graphs, of {memory['limit']:,} bytes")
    estimate = report["estimate"]
    if estimate is not None:
        if estimate["mean_step_seconds"] is not None:
            lines.append(f"estimate: {estimate['mean_step_seconds'] * 1e3:.3f} ms per step")
        lines.append(
            f"estimate: at least {estimate['warmup_seconds_at_least']:.0f} s to compile "
            f"{report['graph_recipes']} recipes"
        )
    return "\n".join(lines)
