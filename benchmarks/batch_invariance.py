"""Measure how often greedy texts change with the batch and with drafts, and what `batch_invariant` costs.

    python -m benchmarks batch_invariance --json .bench/batch_invariance.json

The reference decodes one request at a time without drafts. Every other case decodes the same prompts with up to
--batch requests at a time, and counts the prompts whose text differs from the reference. Each case runs in a process of
its own, once without and once with `batch_invariant`. VGS_DEVICE names the device; without it the CPU is used.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from typing import Any

from benchmarks.shared import common, drafting

METHODS = {"ngram": drafting.NGRAM, "draft_model": drafting.SAME_VOCAB, "universal_draft": drafting.OTHER_VOCAB}
REFERENCE, BATCHED = "reference", "none"
MAX_LEN = 512


def parse_options() -> argparse.Namespace:
    parser = drafting.parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="prompts")
    parser.add_argument("--batch", type=int, default=8, metavar="B", help="requests at a time (the reference: 1)")
    parser.add_argument("--dtype", default="bfloat16", help="of target and drafter")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="ways to draft")
    common.add_num_drafts(parser, "k", [1, 3, 7])
    common.add_output_len(parser, 48)
    common.add_json(parser)
    return parser.parse_args()


def prompts(count: int) -> list[str]:
    written = runpy.run_path(str(drafting.DEMO / "training_prompts.py"))
    chats, texts = written["build_prompts"](count - count // 2, count // 2, seed=7)
    return [text for pair in zip(chats, texts, strict=False) for text in pair][:count]


def generate(options: argparse.Namespace) -> dict[str, Any]:
    """Decode all prompts in one engine; `--part` is `CASE:K:INVARIANT`."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.tokenizers import get_tokenizer

    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    name, k, invariant = options.part.split(":")
    speculation = None if int(k) == 0 else {**METHODS[name], "num_speculative_tokens": int(k)}
    model = demo_model_path()
    encoded = drafting.encode(get_tokenizer(model), prompts(options.prompts), bos=False)
    with drafting.engine(
        model,
        speculation,
        dtype=options.dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=1 if name == REFERENCE else options.batch,
        max_num_batched_tokens=MAX_LEN,
        additional_config={"gaudi_spec": {"batch_invariant": invariant == "True", "warmup_tokens": 0}},
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in encoded]
        llm.generate(asked[: options.batch], greedy, use_tqdm=False)  # not timed: it warms up
        started = time.perf_counter()
        answers = llm.generate(asked, greedy, use_tqdm=False)
        seconds = time.perf_counter() - started
    texts = [list(answer.outputs[0].token_ids) for answer in answers]
    return {"texts": texts, "tokens_per_second": sum(map(len, texts)) / seconds}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [(BATCHED, 0), *((method, k) for method in options.methods for k in options.k)]
    rows = []
    for invariant in (False, True):
        reference = run_case(options, REFERENCE, 0, invariant)
        for name, k in cases:
            found = run_case(options, name, k, invariant)
            differing = sum(one != other for one, other in zip(found["texts"], reference["texts"], strict=True))
            row = {"batch_invariant": invariant, "drafts": name, "k": k, "differing": differing}
            rows.append(row | {"tokens_per_second": found["tokens_per_second"]})
            common.log(str(rows[-1]))
    return rows


def run_case(options: argparse.Namespace, name: str, k: int, invariant: bool) -> dict[str, Any]:
    part = ["--part", f"{name}:{k}:{invariant}", *drafting.cli(options, "prompts", "batch", "dtype")]
    part += ["--output-len", str(options.tokens)]
    device = os.environ.get("VGS_DEVICE")
    environment = {**drafting.IN_PROCESS, **({"VGS_DEVICE": device} if device else {})}
    found: dict[str, Any] = common.run_part(
        "batch_invariance", part, log_name="batch_invariance", environment=environment, seconds=1800
    )
    return found


def show(rows: list[dict[str, Any]], num_prompts: int) -> None:
    header = ["drafts", "k", f"texts of {num_prompts} that differ", "with batch_invariant", "tokens/s kept"]
    invariant = {(row["drafts"], row["k"]): row for row in rows if row["batch_invariant"]}
    lines = []
    for row in (row for row in rows if not row["batch_invariant"]):
        other = invariant[row["drafts"], row["k"]]
        kept = other["tokens_per_second"] / row["tokens_per_second"]
        lines.append([row["drafts"], str(row["k"]), str(row["differing"]), str(other["differing"]), f"{kept:.2f}"])
    common.log(f"\n{common.markdown(header, lines)}")


def main() -> int:
    options = parse_options()

    def whole() -> None:
        rows = measure(options)
        show(rows, options.prompts)
        if options.json:
            common.write_rows(options, ("prompts", "batch", "dtype", "tokens"), rows)

    return drafting.run_main(options, lambda: generate(options), whole)
