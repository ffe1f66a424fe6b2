"""Records of runs, as written by `gaudi-spec demo --json`, with figures that are easy to check."""

from typing import Any

from vllm_gaudi_spec.tools.report import record


def answer(prompt: str, *steps: tuple[str, int]) -> dict[str, Any]:
    """Return an answer of these steps: their tokens, one word each, and the number of drafts among them."""
    pieces = [f" {piece}" for text, _ in steps for piece in text.split()]
    return {"prompt": prompt, "pieces": pieces, "steps": [[len(text.split()), drafts] for text, drafts in steps]}


PLAIN = answer("Once upon a time", ("there", 0), ("was", 0), ("a", 0), ("boat", 0))
DRAFTED = answer("Once upon a time", ("there", 0), ("was a boat", 2))


def task(
    name: str, speed: float, *, k: int = 2, answers: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a task: the baseline for k = 0, else 10 steps of which two accepted no draft, three one and five two."""
    drafted = {"acc_rate": 0.65, "acc_counts": [8, 5], "num_drafts": 10, "num_draft_tokens": 20}
    drafted |= {"num_accepted_tokens": 13, "accepted_lengths": [2, 3, 5], "tokens_per_step": 2.3}
    drafted |= {"draft_model": "models/drafter", "matches_baseline": {"equal": 1, "tied": 0, "different": 0}}
    plain = {"acc_rate": None, "acc_counts": [], "num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    plain |= {"accepted_lengths": [0], "tokens_per_step": 1.0, "draft_model": None, "matches_baseline": None}
    return {
        "task": name,
        "k": k,
        "batch_size": 1,
        "tokens_per_s": speed,
        "latency_s": 4.0,
        "seconds": [[4.0], [5.0]],
        "latencies": [[{"ttft": 0.1, "tpot": 0.02, "itl": 0.04}], [{"ttft": 0.2, "tpot": 0.04, "itl": 0.04}]],
        "speedup": None,
        "graphs": {"warmup": 7, "listed": 9, "after_warmup": 0, "unexpected": []},
        "compiled_after_warmup": None,
        "steps": 12,
        "host_syncs_per_step": 1.0,
        "answers": answers or [DRAFTED if k else PLAIN],
        **(drafted if k else plain),
        **more,
    }


def run(*tasks: dict[str, Any], device: str = "cpu", model: str = "/models/target") -> dict[str, Any]:
    by_name = {one["task"]: one for one in tasks or (task("baseline", 40.0, k=0), task("ngram", 60.0))}
    if (base := by_name.get("baseline")) is not None:
        for one in by_name.values():
            ratio = one["tokens_per_s"] / base["tokens_per_s"]
            one["speedup"] = {"ratio": ratio, "low": ratio - 0.25, "high": ratio + 0.5} if one["k"] else None
    return record.make(
        command=["gaudi-spec", "demo", "--task", "compare"],
        environment=record.read_environment(),
        device={"device": device, "mode": "eager"},
        settings={"model": model, "dtype": "float32", "osl": 4, "batch_size": 1, "temperature": 0.0, "seed": 0},
        measurement={"turns": 2, "why_one_by_one": None},
        tasks=by_name,
    )
