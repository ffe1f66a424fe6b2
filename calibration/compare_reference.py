"""Compare our engine's texts and log-likelihoods with those of optimum-habana, the reference path on a Gaudi.

python calibration/compare_reference.py MODEL --python REFERENCE/bin/python

REFERENCE is an environment made from requirements/optimum-habana.in: it needs another transformers than vLLM does.
Where there is no Gaudi, the reference is plain transformers, by default of this very environment, and the report notes
so. Nothing here was run on a Gaudi.

Both answer the same prompts, the best token each time. Then our engine computes its log-likelihood of each token of the
prompts and of the reference's answers. The first different token of an answer is called a tie where the reference
itself preferred its token by less than 0.001.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_gaudi_spec.quantization.files import replace
from vllm_gaudi_spec.tools.io.argument_types import json_object, positive
from vllm_gaudi_spec.tools.io.command_line import Parser, add_shared
from vllm_gaudi_spec.tools.io.prompts import SOURCES, load_prompts
from vllm_gaudi_spec.tools.tune.beside_reference import Comparison, compare
from vllm_gaudi_spec.tools.tune.child import run_module
from vllm_gaudi_spec.tools.tune.steps import exit_status

REFERENCE = "vllm_gaudi_spec.tools.tune.reference"
OURS = "vllm_gaudi_spec.tools.tune.beside_reference"


def parse_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face id or folder")
    add("--prompts", metavar="SOURCE", help=f"{SOURCES} (default: a built-in set)")
    add("--limit", type=positive, default=8, metavar="N", help="the first N of them")
    add_shared(
        add,
        "--output-len",
        dest="tokens",
        type=positive,
        default=32,
        metavar="N",
        help="tokens to generate per prompt, past any end token",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both engines")
    add("--python", default=sys.executable, help="of the reference's environment (default: this one)")
    add_shared(
        add,
        "--speculative-config",
        dest="speculative",
        type=json_object,
        metavar="JSON",
        help="as for vllm serve, for our engine",
    )
    add("--engine", type=json_object, default={}, metavar="JSON", help="more options of our LLM(...)")
    add("--out", type=Path, default=Path(".calibration/reference"), metavar="FOLDER", help="the report and the answers")
    options: argparse.Namespace = parser.parse_args()
    return options


def run(options: argparse.Namespace) -> None:
    if options.model.startswith(("/", ".", "~")) and not Path(options.model).is_dir():
        raise ValueError(f"there is no model folder {options.model}; give a folder or a Hugging Face id")
    prompts = load_prompts(options.prompts, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    asked = {"model": options.model, "dtype": options.dtype}
    log(f"reference: {len(prompts)} prompts ...")
    reference = run_module(
        REFERENCE,
        asked | {"prompts": prompts, "tokens": options.tokens},
        options.out / "reference.log",
        options.python,
    )
    write(options, "reference.json", reference)
    described = f"reference: {reference['library']} on {reference['device']}"
    log(described if reference["device"] == "hpu" else f"{described}: there is no Gaudi, so not optimum-habana")
    log("our engine ...")
    more = {"texts": reference["answers"], "speculative": options.speculative, "engine": options.engine}
    ours = run_module(OURS, asked | more, options.out / "ours.log")
    write(options, "ours.json", ours)
    found = compare(reference, ours)
    named = {"reference": reference["library"], "device": reference["device"], "dtype": options.dtype}
    write(options, "comparison.json", named | found.as_json())
    show(found, reference, ours)
    print(f"\nwritten to {options.out}: reference.json, ours.json, comparison.json", flush=True)


def show(found: Comparison, reference: dict[str, Any], ours: dict[str, Any]) -> None:
    print(f"texts equal: {found.equal} of {found.of}")
    for one in found.differences:
        margin = f"{one.margin:.2g}{' (a tie)' if one.tied else ''}"
        print(
            f"  prompt {one.prompt}, token {one.position}: {one.ours}; "
            f"the reference preferred {one.reference} by {margin}"
        )
        for name, side in (("reference", reference), ("ours", ours)):
            print(f"    {name}: {side['answers'][one.prompt]['text']!r}")
    print(
        f"log-likelihood of {found.num_scored} tokens: largest difference {found.largest:.2g}, "
        f"average {found.average:.2g}"
    )


def write(options: argparse.Namespace, name: str, report: dict[str, Any]) -> None:
    replace(options.out / name, (json.dumps(report, indent=1) + "\n").encode())


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    options = parse_options()
    return exit_status("compare_reference", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
