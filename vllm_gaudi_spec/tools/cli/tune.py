"""`gaudi-spec tune`: which drafter, and how many drafts; its options. The measuring is in tools/tune/."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.config import GAUDIS, MAX_DRAFTS
from vllm_gaudi_spec.tools.cli.output import fail, model_mistake
from vllm_gaudi_spec.tools.io import output_files
from vllm_gaudi_spec.tools.io.argument_types import json_object, not_negative, positive
from vllm_gaudi_spec.tools.io.command_line import add_shared
from vllm_gaudi_spec.tools.io.prompts import SOURCES
from vllm_gaudi_spec.tools.tune.drafters import HOW_TO_WRITE, Drafter

DESCRIPTION = """\
Find the method, the number of drafts k and the schedule of k by batch size with the highest throughput.

Examples:
  gaudi-spec tune MODEL --draft draft_model=DRAFTER --draft eagle=HEAD --batches 1 4 16
  gaudi-spec tune MODEL --draft draft_model=DRAFTER --card gaudi3

For each drafter and k an engine of its own answers the prompts, which measures acceptance, and times its steps with
drafts and without in turns, at each batch size. With --card no step is timed: costs are estimates for that card by the
cost model of `gaudi-spec estimate`, and one engine per drafter measures acceptance. Nothing here was run on a Gaudi.

Written to --out: choice.json with the arguments for `vllm serve`, choice.html, and each engine's answers, which are
kept: an interrupted command goes on where it was, and only what changed is measured again. ngram is always tried.

Exit status: 0 when there is an answer (also that speculation does not pay), 1 when something failed, 2 for wrong
options.
"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="measure which drafter, and how many drafts, give the highest throughput",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face id or folder of the target")
    add_shared(
        add,
        "--draft",
        type=Drafter.parse,
        action="append",
        default=[],
        metavar="METHOD[=MODEL]",
        help=f"a drafter to try, can be repeated: {HOW_TO_WRITE} (default: ngram alone)",
    )
    add("--prompts", metavar="SOURCE", help=f"{SOURCES} (default: a built-in set)")
    add("--limit", type=positive, metavar="N", help="use only the first N prompts (default: all)")
    add_shared(
        add,
        "--num-speculative-tokens",
        dest="num_drafts",
        type=positive,
        nargs="+",
        default=[1, 2, 3, 4, 5],
        metavar="K",
        help="numbers of drafts per step to try",
    )
    add(
        "--batches",
        type=positive,
        nargs="+",
        default=[1, 4, 16],
        metavar="B",
        help="batch sizes (concurrency) that the server will have",
    )
    add("--max-num-seqs", type=positive, metavar="N", help="as for vllm serve (default: the largest of --batches)")
    add_shared(
        add,
        "--output-len",
        dest="tokens",
        type=positive,
        default=64,
        metavar="N",
        help="tokens to generate per prompt, past any end token",
    )
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="sampling temperature; 0: greedy")
    add(
        "--turns",
        type=positive,
        default=3,
        metavar="N",
        help="measured turns with drafts and without, at each batch size",
    )
    add_shared(add, "--card", choices=GAUDIS, help="estimate this card's costs instead of timing steps here")
    add("--one-run", action="store_true", help="with --card: estimate smaller k from the run with the largest")
    add(
        "--context",
        type=positive,
        metavar="N",
        help="with --card: tokens of KV per request (default: as the prompts)",
    )
    add_shared(
        add,
        "--speculative-config",
        dest="speculative",
        type=json_object,
        default={},
        metavar="JSON",
        help="as for vllm serve, for all drafters: without method, model and num_speculative_tokens",
    )
    add(
        "--engine",
        type=json_object,
        default={},
        metavar="JSON",
        help='more options of LLM(...), as {"dtype": "float32"}',
    )
    add("--out", type=Path, default=Path(".calibration/speculation"), metavar="FOLDER", help="results and kept answers")
    output_files.add_json(add, "the choice")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if mistake := contradiction_in(options) or output_files.mistake("--json", options.json):
        return fail("tune", mistake)
    models = [options.model, *(drafter.config.get("model") for drafter in options.draft)]
    if mistake := model_mistake(*models) or versions.vllm_mistake():
        return fail("tune", mistake)
    from vllm_gaudi_spec.tools.tune.choose import main

    return main(options)


# What differs from engine to engine, in vLLM's words and in those of this command.
_TRIED = {"method": "--draft", "model": "--draft", "num_speculative_tokens": "--num-speculative-tokens"}


def contradiction_in(options: argparse.Namespace) -> str | None:
    if max(options.num_drafts) > MAX_DRAFTS:
        return f"--num-speculative-tokens: a step verifies at most {MAX_DRAFTS} drafts, not {max(options.num_drafts)}"
    if options.max_num_seqs and options.max_num_seqs < max(options.batches):
        return f"--max-num-seqs {options.max_num_seqs} is less than a batch of {max(options.batches)}"
    if not options.card and (options.one_run or options.context):
        return "--one-run and --context are for --card"
    for name, instead in _TRIED.items():
        if name in options.speculative:  # it would replace every drafter's own, and be measured under their names
            return f"--speculative-config: {name} is what this command chooses; leave it out, and give {instead}"
    if options.tokens < 2:
        return "--output-len: the first token is the prompt's, so 2 at least"
    return None
