"""`gaudi-spec estimate`: its options, and the table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import GAUDIS, MAX_DRAFTS
from vllm_gaudi_spec.tools.cli.output import FINE, fail
from vllm_gaudi_spec.tools.io import output_files, terminal
from vllm_gaudi_spec.tools.io.argument_types import json_object, positive
from vllm_gaudi_spec.tools.io.command_line import add_shared

if TYPE_CHECKING:
    from vllm_gaudi_spec.tools.estimate.times import Pair

DESCRIPTION = """\
Estimate how long decode steps, prompts and rounds of drafts take on a card that is not here, and if the model fits.

Examples:
  gaudi-spec estimate MODEL --card gaudi3 --batches 1 16
  gaudi-spec estimate MODEL --speculative-config '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}'

It reads the headers of the models' safetensors files; a folder with a config.json alone is taken as bfloat16. No engine
is started. The cost model was fitted on an H200 and held against an H100; of a Gaudi nothing was measured, so its
figures are predictions. One card; compiles, and what a server adds between two steps, are left out.

Exit status: 0 when there is an estimate, 1 when a model's files cannot be read, 2 for wrong options.
"""
CARDS = (*GAUDIS, "h100", "h200")
RATES = (0.5, 0.7, 0.9)


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "estimate",
        help="estimate times and memory of a model on a card that is not here",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of the target")
    add_shared(
        add,
        "--card",
        nargs="+",
        choices=CARDS,
        default=list(CARDS),
        metavar="CARD",
        help=f"which cards, of {', '.join(CARDS)}",
    )
    add("--batches", type=positive, nargs="+", default=[1, 8, 32, 64], metavar="B", help="batch sizes (concurrency)")
    add("--context", type=positive, default=1024, metavar="N", help="tokens of KV per request")
    add("--prompt-len", type=positive, default=512, metavar="N", help="tokens of a prompt")
    add_shared(
        add,
        "--speculative-config",
        dest="speculative",
        type=json_object,
        default={},
        metavar="JSON",
        help="as for vllm serve: method, model (a folder) and num_speculative_tokens",
    )
    output_files.add_json(add, "the estimates")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    spec = options.speculative
    drafter = spec.get("model")
    if mistake := _contradiction_in(spec) or output_files.mistake("--json", options.json):
        return fail("estimate", mistake)
    for model in (options.model, drafter):
        if model is not None and not Path(model).is_dir():
            return fail("estimate", f"an estimate reads a model's files, and there is no folder {model}")
    from vllm_gaudi_spec.tools.estimate.times import Pair

    try:
        pair = Pair.of(
            Path(options.model),
            spec.get("method"),
            Path(drafter) if drafter is not None else None,
            spec.get("num_speculative_tokens", 0),
        )
    except ValueError as error:
        return fail("estimate", str(error), 1)
    rows = list(_rows(pair, options))
    output_files.write_json({"model": options.model, "speculative_config": spec, "rows": rows}, options.json)
    if options.json != output_files.STDOUT:
        _show(rows, pair, options)
    return FINE


def _contradiction_in(spec: dict[str, Any]) -> str | None:
    if not spec:
        return None
    if unknown := sorted(spec.keys() - {"method", "model", "num_speculative_tokens"}):
        return f"--speculative-config: an estimate knows method, model and num_speculative_tokens, not {unknown[0]}"
    num_drafts = spec.get("num_speculative_tokens")
    if "method" not in spec or not isinstance(num_drafts, int) or not 0 < num_drafts <= MAX_DRAFTS:
        return f"--speculative-config: give a method, and num_speculative_tokens from 1 to {MAX_DRAFTS}"
    return None


def _rows(pair: Pair, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from card_emulator.cost import CARDS, basis_of

    for card in options.card:
        for batch in options.batches:
            where = (batch, options.context, card)
            row = {
                "card": card,
                "basis": basis_of(card),
                "batch": batch,
                "context": options.context,
                "prompt_len": options.prompt_len,
                "plain_ms": 1e3 * pair.plain_s(*where),
                "prompt_ms": 1e3 * pair.prompt_s(batch, options.prompt_len, card),
                "memory_bytes": pair.memory(*where),
                "fits": pair.memory(*where) < CARDS[card].memory,
            }
            if pair.num_drafts:
                row |= {
                    "verify_ms": 1e3 * pair.verify_s(*where),
                    "draft_ms": 1e3 * pair.draft_s(*where),
                    "speedup": {str(rate): pair.speedup(*where, rate) for rate in RATES},
                }
            yield row


def _show(rows: list[dict[str, Any]], pair: Pair, options: argparse.Namespace) -> None:
    header = ["card", "batch", "plain ms", "tokens/s", f"prompts of {options.prompt_len}, ms"]
    if pair.num_drafts:
        header += ["verify ms", "draft ms", *(f"speedup at {rate}" for rate in RATES)]
    lines = [[*header, "GiB", "fits"]]
    for row in rows:
        line = [
            row["card"],
            str(row["batch"]),
            f"{row['plain_ms']:.2f}",
            f"{1e3 * row['batch'] / row['plain_ms']:.0f}",
            f"{row['prompt_ms']:.0f}",
        ]
        if pair.num_drafts:
            line += [f"{row['verify_ms']:.2f}", f"{row['draft_ms']:.2f}"]
            line += [f"{speedup:.2f}" for speedup in row["speedup"].values()]
        lines.append([*line, f"{row['memory_bytes'] / 2**30:.1f}", "yes" if row["fits"] else "no"])
    print("\n".join(terminal.aligned(lines)))
    print()
    for card in options.card:
        print(f"{card}: {next(row['basis'] for row in rows if row['card'] == card)}")
    if pair.num_drafts:
        print("speedup: over no drafts, where each draft after accepted ones is accepted at that rate")
