"""What the outcomes of a case amount to: equal to its reference or not, whose fault it is, and a line of the table."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.full_tests.equality import first_difference
from tests.models.probe import CRASH, DOCTOR, DRAFTS, FAILS, MODEL_DRAFTS, PLAIN, REFUSED, RUNS, TIMEOUT, WITH_DRAFTS

Result = dict[str, Any]

TIE = 1e-3
"""Logits that are no further apart may be ordered either way by rounding."""
ROUGH = 0.3
"""From this tolerance on, a reference rounds otherwise than the kernels do, so that many more may be ordered so."""
BUSY = "@busy"
"""At the end of the names of cases with little KV."""
AGAIN = "@again"
"""And of those that are asked a second time."""
POOLED = 1e-4
"""How far a number of an embedding, or the probability of a class, may be off."""
EQUAL, TIED, DIFFERS = "equal", "tied", "differs"


@dataclass(frozen=True)
class Equality:
    kind: str
    text: str


@dataclass
class Row:
    """A case in the table. `faults` are ours; none of them may be left."""

    case: str
    ours: str
    reference: str = ""
    drafts: str = ""
    model_drafts: str = ""
    steps: str = ""
    upstream: str = ""
    doctor: str = ""
    cause: str = ""
    faults: list[str] = field(default_factory=list)


def equality(found: Result, reference: Result, tolerance: float) -> Equality:
    """Of all prompts: tokens, and the log-probabilities of those up to the first that differs."""
    if "vectors" in found:
        return same_vectors(found, reference)
    where: list[str] = []
    kind, worst = EQUAL, 0.0
    tie = tolerance if tolerance >= ROUGH else TIE
    for prompt, (some, others) in enumerate(zip(found["tokens"], reference["tokens"], strict=True)):
        at = first_difference(some, others)
        pairs = list(zip(found["logprobs"][prompt], reference["logprobs"][prompt], strict=True))[:at]
        off = [abs(one - other) for one, other in pairs]
        worst = max([worst, *(math.inf if math.isnan(value) else value for value in off)])
        if at is None:
            where.append("-")
            continue
        margin = reference["margins"][prompt][at] if "margins" in reference else None
        where.append(f"{at}" + (f" (margin {margin:.2g})" if margin is not None else ""))
        is_tie = wins_tie(found, reference, prompt, at, tie, tolerance)
        kind = DIFFERS if not is_tie or kind == DIFFERS else TIED
    if worst > tolerance:
        return Equality(DIFFERS, f"log-probabilities differ by {worst:.2g}; tokens at {', '.join(where)}")
    if kind == EQUAL:
        return Equality(EQUAL, f"equal ({worst:.0e})")
    label = "equal but for ties" if kind == TIED else "differs"
    return Equality(kind, f"{label} at {', '.join(where)}")


def same_vectors(found: Result, reference: Result) -> Equality:
    pairs = zip(found["vectors"], reference["vectors"], strict=True)
    off = [abs(one - other) for some, others in pairs for one, other in zip(some, others, strict=True)]
    worst = max(math.inf if math.isnan(value) else value for value in off)
    if worst > POOLED:
        return Equality(DIFFERS, f"numbers differ by {worst:.2g}")
    return Equality(EQUAL, f"equal ({worst:.0e})")


def wins_tie(found: Result, reference: Result, prompt: int, at: int, tie: float, tolerance: float) -> bool:
    """Whether the token at which a text parts from the reference is one that the reference had nearly chosen, and as
    likely as it is there. What follows is another text, and is not compared."""
    if "next" not in reference or at >= len(found["tokens"][prompt]):
        return False
    token = found["tokens"][prompt][at]
    expected = reference["next"][prompt][at].get(str(token))
    return (
        expected is not None
        and reference["logprobs"][prompt][at] - expected < tie
        and abs(found["logprobs"][prompt][at] - expected) <= tolerance
    )


def same_texts(on: Result, off: Result, reference: Result | None) -> Equality:
    """Drafts on with off: no token may differ, but where the reference has two of equal logits."""
    found = [first_difference(some, others) for some, others in zip(on["tokens"], off["tokens"], strict=True)]
    if all(at is None for at in found):
        return Equality(EQUAL, "equal")
    where = ", ".join("-" if at is None else str(at) for at in found)
    if reference is not None:
        ties = [at is None or _is_tie_of_both(on, off, reference, prompt, at) for prompt, at in enumerate(found)]
        if all(ties):
            return Equality(TIED, f"equal but for ties at {where}")
    return Equality(DIFFERS, f"DIFFERS at {where}")


def _is_tie_of_both(on: Result, off: Result, reference: Result, prompt: int, at: int) -> bool:
    """Both follow the reference up to there, and each goes on with its token or with one that it had nearly chosen."""
    expected = reference["tokens"][prompt]
    return off["tokens"][prompt][:at] == expected[:at] and all(
        side["tokens"][prompt][at : at + 1] == expected[at : at + 1] or wins_tie(side, reference, prompt, at, TIE, TIE)
        for side in (on, off)
    )


def one_line(result: Result | None) -> str:
    if result is None:
        return ""
    if result["outcome"] == RUNS:
        return RUNS
    kind = f"{result['type']}: " if result.get("type") and result["outcome"] == CRASH else ""
    where = f" [{result['where']}]" if result.get("where") and result["outcome"] == CRASH else ""
    label = "refused late" if result.get("late_refusal") else result["outcome"]
    return f"{label}: {kind}{result.get('error', '')}{where}"


def alike(ours: Result, upstream: Result | None) -> bool:
    """Whether both end with the same error."""
    if upstream is None or upstream["outcome"] in (RUNS, TIMEOUT) or ours["outcome"] in (RUNS, REFUSED):
        return False
    return (ours.get("type"), _plain(ours)) == (upstream.get("type"), _plain(upstream))


def _plain(result: Result) -> str:
    """An error without what differs from process to process: addresses, numbers, and the order of a set."""
    return re.sub(r"0x[0-9a-f]+|\d+|\{.*", "#", result.get("error", ""))[:160]


def row(case: str, results: dict[str, Result], reference: Result | None, tolerance: float) -> Row:
    """`results`: by variant, and upstream's, as far as they were run."""
    plain, upstream = results[PLAIN], results.get("upstream")
    found = Row(case=case, ours=one_line(plain), upstream=one_line(upstream))
    upstream_runs = upstream is not None and upstream["outcome"] == RUNS
    excuse = None
    if plain["outcome"] == RUNS:
        found.cause = "runs"
        if "tokens" in plain or "vectors" in plain:
            _compare(found, plain, upstream if upstream_runs else None, reference, tolerance)
    elif alike(plain, upstream):
        excuse = found.cause = "fails in vLLM, upstream alike"
    elif plain["outcome"] == FAILS:
        excuse = found.cause = "vLLM's configuration fails"
    elif plain["outcome"] == REFUSED:
        found.cause = f"refused: {_cause(case, plain)}"
    else:
        found.cause = "late refusal" if plain.get("late_refusal") else plain["outcome"]
        found.faults.append(found.cause)
    found.drafts, found.model_drafts = (
        _drafts(found, variant, results.get(variant), plain, reference) for variant in WITH_DRAFTS
    )
    _doctor(found, results.get(DOCTOR), plain, excused=excuse is not None and plain["outcome"] != FAILS)
    found.steps = _steps([results[variant] for variant in (PLAIN, *WITH_DRAFTS) if variant in results])
    for variant in (PLAIN, *WITH_DRAFTS):
        result = results.get(variant, {})
        found.faults += [f"{fault}, {variant}" for fault in _faults_of_steps(result)]
        if damage := result.get("canary"):
            found.faults.append(f"canary, {variant}: {damage}")
        if case.endswith(BUSY) and result.get("preemptions") == 0:
            found.faults.append(f"{variant}: no request was preempted")
        if case.endswith(AGAIN) and "cached" in result:
            found.faults += [f"{fault}, {variant}" for fault in _faults_of_caching(result)]
        if result.get("guarded") == 0:
            found.faults.append(f"{variant}: no KV buffer was guarded")
    return found


def _compare(found: Row, plain: Result, upstream: Result | None, reference: Result | None, tolerance: float) -> None:
    beside = equality(plain, upstream, tolerance) if upstream is not None else None
    if beside is not None:
        found.upstream = f"runs; ours to it: {beside.text}"
    if reference is None:
        found.reference = "none" if beside is None else f"upstream: {beside.text}"
        if beside is not None and beside.kind == DIFFERS:
            found.faults.append("differs from upstream")
        return
    against = equality(plain, reference, tolerance)
    found.reference = against.text
    if against.kind != DIFFERS:
        return
    if beside is not None and beside.kind != DIFFERS:
        found.cause = "runs, differs from transformers exactly as upstream"
    else:
        found.faults.append("wrong answer")


def _num_compiled(steps: dict[str, Any]) -> int:
    """After warm-up: by our own count of shapes, and by the device's where it has one."""
    return steps["graphs"]["after_warmup"] + steps["device"].get("compiled_after_warmup", 0)


def _steps(results: list[Result]) -> str:
    """What was compiled after warm-up in all runs, and device-to-host syncs a step in that with the most."""
    found = [result["steps"] for result in results if "steps" in result]
    if not found:
        return ""
    syncs = max(steps["host_syncs_per_step"] for steps in found)
    return f"{sum(map(_num_compiled, found))}, {syncs:.2f}"


def _faults_of_steps(result: Result) -> Iterator[str]:
    """What no step may do, on any device: compile, wait for the device a second time, or go on without its drafter."""
    if (steps := result.get("steps")) is None:
        return
    if (compiled := _num_compiled(steps)) > 0:
        yield f"{compiled} shapes compiled after warm-up"
    if (syncs := steps["host_syncs_per_step"]) > 1:
        yield f"{syncs:.2f} device-to-host syncs a step"
    if (faults := steps.get("drafter", {}).get("faults", 0)) > 0:
        yield f"the drafter failed {faults} times"


def _faults_of_caching(result: Result) -> Iterator[str]:
    """Of prompts that begin with less text than a block holds, then an item; or of text, longer than a block."""
    before, after = result["cached"]
    if any(before):
        yield f"blocks of other prompts were taken: {before}"
    if not all(after):
        yield f"a prompt was not in the prefix cache: {after}"
    if not result["same_again"]:
        yield "another answer the second time"


def _drafts(found: Row, variant: str, drafts: Result | None, plain: Result, reference: Result | None) -> str:
    if drafts is None:
        return ""
    if drafts["outcome"] != RUNS:
        if drafts["outcome"] != REFUSED:
            found.faults.append(f"with {variant}: {drafts['outcome']}")
        return one_line(drafts)
    same = same_texts(drafts, plain, reference)
    if same.kind == DIFFERS:
        found.faults.append(f"{variant} change the text")
    return f"{same.text}, {drafts['accepted']}/{drafts['draft']}"


def _doctor(found: Row, doctor: Result | None, plain: Result, excused: bool) -> None:
    if doctor is None:
        return
    found.doctor = doctor["outcome"]
    fits = (doctor["outcome"] == "fine") == (plain["outcome"] == RUNS)
    if not fits:
        found.doctor += " (not so)"
        if not excused:
            found.faults.append(f"doctor: {doctor['outcome']}")


def _cause(case: str, result: Result) -> str:
    """A refusal without the name of its model."""
    return result.get("error", "").replace(case.split("@")[0], "MODEL")[:140]


# ---- tables ----------------------------------------------------------------------------------------------

COLUMNS = ("model", "ours", "reference", DRAFTS, MODEL_DRAFTS, "compiled, syncs a step", "upstream", "doctor")


def cells(one: Row, limit: int | None = None) -> tuple[str, ...]:
    texts = (one.case, one.ours, one.reference, one.drafts, one.model_drafts, one.steps, one.upstream, one.doctor)
    if one.faults:
        texts = (f"{one.case} (!)", *texts[1:])
    return tuple(text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…" for text in texts)


def markdown(rows: list[Row], title: str) -> str:
    lines = [f"# {title}", "", f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for one in rows:
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells(one)) + " |")
    lines += ["", *summary(rows), ""]
    return "\n".join(lines)


def summary(rows: list[Row]) -> Iterator[str]:
    """Counts by cause, what upstream runs and we do not, and every fault."""
    yield f"{len(rows)} cases:"
    yield from (f"- {count} {cause}" for cause, count in Counter(one.cause for one in rows).most_common())
    more = Counter(one.cause for one in rows if one.upstream.startswith(RUNS) and not one.ours.startswith(RUNS))
    if more:
        yield ""
        yield f"{more.total()} of them run on upstream's CPU platform and not on ours:"
        yield from (f"- {count} {cause}" for cause, count in more.most_common())
    faulty = [one for one in rows if one.faults]
    yield ""
    yield f"{len(faulty)} with faults" + (":" if faulty else ".")
    yield from (f"- {one.case}: {'; '.join(one.faults)}" for one in faulty)
