"""Compare acceptance rules on a GPU with upstream's own rejection samplers, on the same inputs.

python -m benchmarks rejection --json .bench/rejection.json      # a CUDA GPU, minutes
python -m benchmarks rejection --size tiny                       # anywhere: only whether the rules do what they should

Every sampler starts from float32 logits to which the temperature has been applied and returns the accepted tokens and
their number. The target's logits are the drafter's plus noise; the table shows the number of accepted drafts per row.
Upstream's newer sampler does not read the last position of a greedy row in which it rejects a draft, so it is faster if
fewer drafts are accepted. Each sampler gets the drafter's distribution as its engine stores it: float32 probabilities
for our samplers and upstream's older one (`v1/sample`), and bfloat16 logits for upstream's newer one (`v1/worker/gpu`).
The copies with which the older sampler separates drafted positions from the last one are not timed.

A cell is timed with replays of a CUDA graph over several sets of inputs, which together are larger than the L2 cache
unless they are tiny. The newer sampler has no strict rule and treats drafts without a distribution as one-hot. `must
read` includes the logits once and the distributions that a rule needs once: one position per row for standard, and all
positions for block. For greedy and strict, it includes the logits up to the first rejection in each row, because only
these affect the result. `sure` is the strict rule with correct drafts, so that everything must be read; upstream
samples other tokens and has no such case.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.shared import common
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.noise import Stream, gumbel
from vllm_gaudi_spec.sampling.rules.registry import TORCH, Rules
from vllm_gaudi_spec.tools.io.command_line import Parser

RULES = ("greedy", "strict", "sure", "standard", "block")
BATCHES = (1, 8, 32, 64, 128, 256)
DRAFTS = (1, 2, 4, 8)
VOCABS = (32_000, 128_256, 256_000)
TEMPERATURE = 0.7
NOISE = 1.0
# The cells that count have at least this batch size and more than this number of bytes of logits.
COUNTED_BATCH, COUNTED_BYTES = 8, 64e6
ASKED = 0.7
"""The fraction of the GPU's read bandwidth that a sampler is expected to reach."""
SET_BYTES, MOST_SETS = 300e6, 16
SECONDS = 0.004
TIE = 1e-4


class Case(NamedTuple):
    rule: str
    logits_BQV: torch.Tensor
    drafts_BK: torch.Tensor
    num_drafts_B: torch.Tensor
    temperature_B: torch.Tensor
    keys_B2: torch.Tensor
    positions_BQ: torch.Tensor
    draft_logits_BKV: torch.Tensor | None
    """Logits in bfloat16, before the temperature is applied."""
    draft_probs_BKV: torch.Tensor | None


def make_case(rule: str, batch: int, drafts: int, vocab: int, device: str, seed: int) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    draft_logits = normal(batch, drafts, vocab).mul_(2).bfloat16()
    logits = normal(batch, drafts + 1, vocab).mul_(NOISE)
    logits[:, :drafts] += draft_logits
    keys = torch.randint(-(2**31), 2**31, (batch, 2), generator=generator, device=device).int()
    starts = torch.randint(0, 4096, (batch, 1), generator=generator, device=device)
    positions = (starts + torch.arange(drafts + 1, device=device)).int()
    temperature = torch.full((batch,), 0.0 if rule == "greedy" else TEMPERATURE, device=device)
    if rule == "greedy":
        chosen = draft_logits.argmax(-1).int()
    else:
        logits /= TEMPERATURE
        stream = Stream.TARGET if rule in ("strict", "sure") else Stream.DRAFT
        chosen = torch.empty(batch, drafts, dtype=torch.int32, device=device)
        tokens = torch.arange(vocab, dtype=torch.int32, device=device)
        for position in range(drafts):
            scores = gumbel(keys, positions[:, position : position + 1], stream, tokens)[:, 0]
            drafter = logits[:, position] if rule == "sure" else draft_logits[:, position].float() / TEMPERATURE
            chosen[:, position] = scores.add_(drafter).argmax(-1)
    has_probs = rule in ("standard", "block")
    return Case(
        rule,
        logits,
        chosen,
        torch.full((batch,), drafts, dtype=torch.int32, device=device),
        temperature,
        keys,
        positions,
        draft_logits if has_probs else None,
        (draft_logits.float() / TEMPERATURE).softmax(-1) if has_probs else None,
    )


def must_read(rule: str, batch: int, drafts: int, vocab: int, accepted: float) -> float:
    by_probs = {"standard": batch * (drafts + 2), "block": batch * (2 * drafts + 1)}
    return 4 * vocab * by_probs.get(rule, batch * (accepted + 1))


# ---- ours ----------------------------------------------------------------------------------------------


def judge(rules: Rules, case: Case) -> Verification:
    drafts = case.drafts_BK, case.num_drafts_B
    noise = case.temperature_B, case.keys_B2, case.positions_BQ
    if case.rule == "greedy":
        return rules.strict_greedy(case.logits_BQV, *drafts)
    if case.rule in ("strict", "sure"):
        return rules.strict_random(case.logits_BQV, *drafts, *noise)
    return rules.verify[case.rule](case.logits_BQV, case.draft_probs_BKV, *drafts, *noise)


# ---- upstream's ----------------------------------------------------------------------------------------


def prepare_newer(case: Case) -> Callable[[], Verification]:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    device = case.logits_BQV.device
    batch, queries, vocab = case.logits_BQV.shape
    logits = case.logits_BQV.view(-1, vocab)
    # The token before each sampled position, which is not a draft for the first position.
    before = torch.cat((torch.zeros_like(case.drafts_BK[:, :1]), case.drafts_BK), 1).flatten()
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=device)
    row_of_position = rows.repeat_interleave(queries)
    offset_in_row = torch.arange(queries, dtype=torch.int32, device=device).repeat(batch)
    positions, seeds = case.positions_BQ.flatten().long(), case.keys_B2[:, 0].long()

    def run() -> Verification:
        return Verification(
            *rejection_sample(
                logits,
                case.draft_logits_BKV,
                before,
                starts,
                positions,
                rows,
                row_of_position,
                offset_in_row,
                case.temperature_B,
                seeds,
                queries - 1,
                use_block_verification=case.rule == "block",
            )
        )

    return run


def prepare_older(case: Case) -> Callable[[], Verification]:
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample
    from vllm.v1.sample.rejection_sampler import rejection_sample

    batch, queries, vocab = case.logits_BQV.shape
    drafts = queries - 1
    target, last = case.logits_BQV[:, :drafts].reshape(-1, vocab), case.logits_BQV[:, drafts].contiguous()
    ends = torch.arange(drafts, batch * drafts + 1, drafts, dtype=torch.int32, device=target.device)
    chosen = case.drafts_BK.flatten()
    probs = None if case.draft_probs_BKV is None else case.draft_probs_BKV.view(-1, vocab)
    is_greedy = case.rule == "greedy"
    metadata = SimpleNamespace(
        all_greedy=is_greedy, all_random=not is_greedy, temperature=case.temperature_B, generators={}
    )

    def run() -> Verification:
        bonus = last.argmax(-1) if is_greedy else random_sample(last.softmax(-1), {})
        tokens = rejection_sample(
            chosen, [drafts] * batch, drafts, ends, probs, target, bonus[:, None].contiguous(), metadata
        )
        return Verification(tokens, (tokens >= 0).sum(-1))

    return run


UPSTREAM = {"newer": prepare_newer, "older": prepare_older}


def has_rule(sampler: str, rule: str) -> bool:
    return rule != "sure" and (sampler == "newer" or rule != "block")


# ---- correctness ---------------------------------------------------------------------------------------


def check_equal(rules: Rules, case: Case) -> int:
    """Return the number of rows that differ from the reference, and raise an error if one of them is not a tie."""
    found, expected = judge(rules, case), judge(TORCH, case)
    position = torch.arange(found.tokens_BQ.shape[1], device=found.tokens_BQ.device)
    same_number = found.num_sampled_B == expected.num_sampled_B
    counted = position < expected.num_sampled_B[:, None]
    differs_B = ~same_number | ((found.tokens_BQ != expected.tokens_BQ) & counted).any(-1)
    num = int(differs_B.sum())
    if case.rule in ("greedy", "strict", "sure"):
        # Every position is sampled independently, so ties can be checked.
        scores = case.logits_BQV
        if case.rule != "greedy":
            tokens = torch.arange(scores.shape[2], dtype=torch.int32, device=scores.device)
            scores = scores + gumbel(case.keys_B2, case.positions_BQ, Stream.TARGET, tokens)
        found_scores = scores.gather(2, found.tokens_BQ.long()[..., None])[..., 0]
        worst = float((scores.amax(-1) - found_scores)[position < found.num_sampled_B[:, None]].max())
        if worst > TIE:
            raise AssertionError(f"{case.rule}: a token's score lies {worst} below the best")
    elif num > max(2, 0.02 * len(differs_B)):
        raise AssertionError(f"{case.rule}: {num} of {len(differs_B)} rows differ from the reference")
    return num


def check_rate(run: Callable[[Case], Verification], rule: str, device: str) -> float:
    """Check the acceptance rate of the first draft over many rows with a small vocabulary.

    Return how far the rate deviates from the one that the distributions imply, in standard deviations, and raise an
    error if it deviates too far.
    """
    case = make_case(rule, 4096, 1, 64, device, seed=5)
    probs = case.logits_BQV[:, 0].softmax(-1)
    if rule == "greedy":
        expected = (case.logits_BQV[:, 0].argmax(-1) == case.drafts_BK[:, 0]).double()
    elif case.draft_probs_BKV is None:
        expected = probs.gather(1, case.drafts_BK.long())[:, 0].double()
    else:
        expected = torch.minimum(probs, case.draft_probs_BKV[:, 0]).sum(-1).double()
    accepted = (run(case).num_sampled_B - 1).double()
    error = float((accepted - expected).sum().abs())
    deviation = math.sqrt(float((expected * (1 - expected)).sum()))
    if error > max(5 * deviation, 1e-9):
        raise AssertionError(f"{rule}: accepted {accepted.mean():.4f}, expected {expected.mean():.4f}")
    return error / deviation if deviation else 0.0


def check(rules: Rules, device: str, shapes: list[tuple[int, int, int]]) -> dict[str, Any]:
    differing = {
        f"{rule} {shape}": check_equal(rules, make_case(rule, *shape, device, seed=7))
        for rule in RULES
        for shape in shapes
    }
    # The strict rule uses the same noise as coupled drafts, so its rate is not that of independent samples.
    independent = [rule for rule in RULES if rule not in ("strict", "sure")]
    rates = {f"ours {rule}": check_rate(lambda c: judge(rules, c), rule, device) for rule in independent}
    if device == "cuda":
        for name, prepare in UPSTREAM.items():
            for rule in RULES:
                if has_rule(name, rule):
                    rates[f"{name} {rule}"] = check_rate(lambda c, p=prepare: p(c)(), rule, device)
    return {"rows that tie": differing, "acceptance, standard deviations off": rates}


# ---- time ----------------------------------------------------------------------------------------------


def captured_seconds(runs: list[Callable[[], Verification]]) -> float:
    """Return the seconds per run, measured with replays of a graph that contains all runs."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    once = events_seconds(graph.replay, 1)
    repeats = max(3, min(200, int(SECONDS / once)))
    return min(events_seconds(graph.replay, repeats) for _ in range(3)) / len(runs)


def events_seconds(work: Callable[[], Any], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def read_bandwidth() -> float:
    values = torch.randn(1 << 30, device="cuda")
    values.amax()
    return values.nbytes / min(events_seconds(values.amax, 5) for _ in range(3))


@dataclass
class Cell:
    rule: str
    batch: int
    drafts: int
    vocab: int
    accepted: float
    seconds: dict[str, float]
    """Seconds for our sampler and for upstream's newer and older samplers."""
    must_read: float
    logits: int

    @property
    def counts(self) -> bool:
        return self.batch >= COUNTED_BATCH and self.logits > COUNTED_BYTES

    @property
    def ratio(self) -> float | None:
        """Return the time of upstream's faster sampler divided by ours, or None if upstream's samplers are missing."""
        upstream = [time for name, time in self.seconds.items() if name != "ours"]
        return min(upstream) / self.seconds["ours"] if upstream else None

    @property
    def bandwidth(self) -> float:
        return self.must_read / self.seconds["ours"]

    @property
    def speed(self) -> float:
        """Return the number of bytes of logits divided by the time, even if some logits are not read."""
        return self.logits / self.seconds["ours"]


def measure(rule: str, batch: int, drafts: int, vocab: int, rules: Rules) -> Cell:
    logits = 4 * batch * (drafts + 1) * vocab
    sets = max(1, min(MOST_SETS, math.ceil(SET_BYTES / logits)))
    cases = [make_case(rule, batch, drafts, vocab, "cuda", seed) for seed in range(sets)]
    runs: dict[str, list[Callable[[], Verification]]] = {"ours": [lambda c=case: judge(rules, c) for case in cases]}
    for name, prepare in UPSTREAM.items():
        if has_rule(name, rule):
            runs[name] = [prepare(case) for case in cases]
    accepted = float(torch.cat([judge(rules, case).num_sampled_B for case in cases]).float().mean()) - 1
    seconds = {name: captured_seconds(each) for name, each in runs.items()}
    needed = must_read(rule, batch, drafts, vocab, accepted)
    return Cell(rule, batch, drafts, vocab, accepted, seconds, needed, logits)


def summary(cells: list[Cell], bandwidth: float) -> list[dict[str, Any]]:
    found = []
    for rule in (*RULES, "all"):
        counted = [cell for cell in cells if cell.counts and rule in (cell.rule, "all")]
        if not counted:
            continue
        ratios = [cell.ratio for cell in counted if cell.ratio]
        shares = [cell.bandwidth / bandwidth for cell in counted]
        speeds = [cell.speed / bandwidth for cell in counted]
        found.append(
            {
                "rule": rule,
                "cells": len(counted),
                "compared": len(ratios),
                "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else "-",
                "least_ratio": min(ratios, default="-"),
                "share_as_fast": sum(ratio >= 1 for ratio in ratios) / len(ratios) if ratios else "-",
                "least_share_must_read": min(shares),
                "reach_70_must_read": sum(share >= ASKED for share in shares),
                "least_share_logits": min(speeds),
                "reach_70_logits": sum(speed >= ASKED for speed in speeds),
            }
        )
    return found


def show(cells: list[Cell], totals: list[dict[str, Any]], bandwidth: float) -> None:
    def micros(cell: Cell, name: str) -> str:
        return f"{cell.seconds[name] * 1e6:.1f}" if name in cell.seconds else "-"

    header = [
        "rule",
        "B",
        "k",
        "V",
        "accepted",
        "ours us",
        "newer us",
        "older us",
        "logits MB",
        "must read MB",
        "GB/s",
        "ratio",
        "",
    ]
    common.log(
        common.markdown(
            header,
            [
                [
                    cell.rule,
                    str(cell.batch),
                    str(cell.drafts),
                    str(cell.vocab),
                    f"{cell.accepted:.2f}",
                    *(micros(cell, name) for name in ("ours", "newer", "older")),
                    f"{cell.logits / 1e6:.1f}",
                    f"{cell.must_read / 1e6:.1f}",
                    f"{cell.bandwidth / 1e9:.0f}",
                    f"{cell.ratio:.2f}" if cell.ratio else "-",
                    "counts" if cell.counts else "",
                ]
                for cell in cells
            ],
        )
    )
    if not totals:
        return
    common.log(f"\nB >= {COUNTED_BATCH} and over {COUNTED_BYTES / 1e6:.0f} MB of logits; reading {bandwidth:.3g} B/s")
    header = list(totals[0])
    rows = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in totals]
    common.log(common.markdown(header, rows))


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--size", choices=("full", "tiny"), default="full", help="tiny checks correctness only, on any machine"
    )
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE", help=f"of {', '.join(RULES)}"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), metavar="B", help="batch sizes")
    common.add_num_drafts(parser, "drafts", list(DRAFTS))
    parser.add_argument(
        "--vocabs", nargs="+", type=int, default=list(VOCABS), metavar="V", help="vocabulary sizes, in tokens"
    )
    common.add_json(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.size == "full" and not torch.cuda.is_available():
        sys.exit("timing needs a CUDA GPU; --size tiny checks the rules without one")
    device, rules, shapes = "cpu", TORCH, [(5, 3, 1000)]
    if torch.cuda.is_available():
        from vllm_gaudi_spec.devices.cuda.rules import RULES as rules

        device, shapes = "cuda", [(5, 3, 1000), (3, 2, 1001), (256, 4, 32_000), (32, 8, 128_256)]
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, **check(rules, device, shapes)}
    common.log("\n".join(f"{name}: {report[name]}" for name in list(report)[2:]))
    if options.size == "full":
        import triton
        import vllm

        bandwidth = read_bandwidth()
        report |= {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "vllm": vllm.__version__}
        cells = [
            measure(rule, batch, drafts, vocab, rules)
            for rule in options.rules
            for vocab in options.vocabs
            for batch in options.batches
            for drafts in options.drafts
        ]
        totals = summary(cells, bandwidth)
        show(cells, totals, bandwidth)
        report |= {"read_bandwidth": bandwidth, "summary": totals}
        report["cells"] = [
            vars(cell) | {"counts": cell.counts, "ratio": cell.ratio, "bandwidth": cell.bandwidth} for cell in cells
        ]
    common.write_json(options.json, report)
