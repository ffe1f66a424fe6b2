"""Measure the acceptance of a drafter with another tokenizer, for four ways to translate between vocabularies.

python -m benchmarks universal --json .bench/universal.json --gemma FOLDER

The output is one table, with 95 % intervals from a bootstrap over prompts: 24 repetitive prompts and eight fixed
openings (on which the demo's drafters were trained). Each case runs in an engine with its own process, in which
requests ask for k drafts per step. Cases that the report already contains are not measured again, so that an
interrupted run can be continued.

"strings" is upstream's matching of vocabularies, run in this engine. FOLDER contains Gemma 3 270M, for which the demo
model is the drafter; without --gemma, this pair is omitted.
"""

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.shared import common, drafting
from benchmarks.shared.drafting import Rates
from vllm_gaudi_spec.drafting.universal import pairs as vocab_pairs
from vllm_gaudi_spec.tools.demo_model import demo_model_path

BASE = "bytes"
GEMMA = "gemma"


@dataclass(frozen=True)
class Pair:
    target: str
    drafter: str
    bos: bool
    """Whether prompts begin with the target's beginning-of-text token."""


@dataclass(frozen=True)
class Method:
    label: str
    options: dict[str, str] = field(default_factory=dict)
    """Options for `gaudi_spec` in additional_config."""
    greedy_drafts_only: bool = False


METHODS = {
    "strings": Method("strings, as upstream"),
    BASE: Method("bytes"),
    "retokenize": Method("bytes, re-tokenized", {"universal_context": "retokenize"}),
    "slem": Method("SLEM", {"universal_context": "retokenize", "universal_match": "slem"}, greedy_drafts_only=True),
}
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
SETTINGS = ("tokens", "prompts", "batch_size", "drafts")


def parse_options() -> argparse.Namespace:
    parser = drafting.parser_of(__doc__)
    drafting.add_acceptance_options(parser, "universal.json")
    parser.add_argument("--gemma", metavar="FOLDER", help="folder of Gemma 3 270M, to measure that pair as well")
    common.add_num_drafts(parser, "drafts", [1, 2, 3, 4, 5])
    return parser.parse_args()


def pairs(options: argparse.Namespace) -> dict[str, Pair]:
    demo = demo_model_path()
    found = {"smollm2": Pair(demo, drafting.OTHER_VOCAB["model"], bos=False)}
    if options.gemma:
        found[GEMMA] = Pair(options.gemma, demo, bos=True)
    return found


# ---- in the child processes ----------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a case by number of drafts."""
    name, method, mode = options.part.split("/")
    pair, temperature = pairs(options)[name], TEMPERATURES[mode]
    from vllm.tokenizers import get_tokenizer

    sets = drafting.prompt_sets(options.prompts)
    texts = [text for texts in sets.values() for text in texts]
    prompts = drafting.encode(get_tokenizer(pair.target), texts, pair.bos)
    kinds = [kind for kind, texts in sets.items() for _ in texts]
    by_k = ask_engine(pair, METHODS[method], method, prompts, temperature, options)
    return {"kinds": kinds, "drafts": by_k}


def ask_engine(
    pair: Pair, how: Method, method: str, prompts: list[list[int]], temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    if method == "strings":
        match_strings()
    config = {"method": "universal_draft", "model": pair.drafter, "num_speculative_tokens": max(options.drafts)}
    if temperature and not how.greedy_drafts_only:
        config |= {"rejection_sample_method": "standard", "draft_sample_method": "probabilistic"}
    with drafting.engine(
        pair.target,
        config,
        additional_config={"gaudi_spec": how.options},
        # A drafter with its own tokens may need more of them than the target and keeps at most this many.
        max_model_len=2 * (max(map(len, prompts)) + options.tokens),
        max_num_seqs=options.batch_size,
        per_request_spec_decode_metrics="detailed",
    ) as llm:
        return {str(k): drafting.ask(llm, prompts, temperature, options.tokens, k) for k in options.drafts}


def match_strings() -> None:
    """Match vocabularies in this process by the strings that tokenizers display, as in vLLM 0.32.

    The drafter reads its unknown or end-of-text token in place of tokens without a match.
    """
    from vllm.v1.spec_decode.vocab_mapping import VocabMapping

    from vllm_gaudi_spec.drafting.universal.vocab_map import VocabMap

    def string_map(target: Any, draft: Any, target_size: int, draft_size: int) -> VocabMap:
        found = VocabMapping(target.tokenizer, draft.tokenizer, target_size, draft_size, "cpu")
        target_ids = found.draft_to_target_ids.numpy()
        draft_ids = np.flatnonzero(target_ids >= 0)
        matches = np.stack([target_ids[draft_ids], draft_ids], axis=1).astype(np.int32)
        return VocabMap.from_pairs(matches, np.ones(len(matches), dtype=bool), target_size, draft_size)

    def unknown_token(drafter: Any) -> int:
        found = VocabMapping(drafter.tokenizer, drafter.tokenizer, 1, 1, "cpu").draft_unk_token_id
        return int(found)

    vocab_pairs.read_vocabulary = lambda model: model
    vocab_pairs.match_vocabularies, vocab_pairs._choose_stand_in = string_map, unknown_token


# ---- in the parent -------------------------------------------------------------------------------------


def case_names(options: argparse.Namespace) -> list[str]:
    return [f"{pair}/{method}/{mode}" for pair in pairs(options) for mode in TEMPERATURES for method in METHODS]


def show(cases: dict[str, Any], names: list[str], drafts: list[int]) -> None:
    max_drafts = max(drafts)
    header = ["target", "T", "method", "k", *(f"pos {position}" for position in range(1, max_drafts + 1))]
    header += ["tokens per step", f"against {BASE}", "repetitive", "openings"]
    rows = [row_of(cases, name, k, max_drafts) for name in names if name in cases for k in drafts]
    common.log("\n" + common.markdown(header, rows) + "\n")
    common.log(
        "tokens per step, and by kind of prompt: per request and step of the target, steps without drafts included."
    )
    common.log(f"against {BASE}: the ratio of tokens per step on the same prompts. [95 % interval]")


def row_of(cases: dict[str, Any], name: str, k: int, max_drafts: int) -> list[str]:
    pair, method, mode = name.split("/")
    requests, kinds = cases[name]["drafts"][str(k)]["requests"], cases[name]["kinds"]
    rates = Rates(requests, k)
    base = cases.get(f"{pair}/{BASE}/{mode}")
    compared = (
        "" if base is None or method == BASE else str(rates.against(Rates(base["drafts"][str(k)]["requests"], k)))
    )
    rates_by_position = [f"{rate.value:.3f}" for rate in rates.positions()]
    by_kind = [
        Rates([request for request, found in zip(requests, kinds, strict=True) if found == kind], k).tokens_per_step()
        for kind in dict.fromkeys(kinds)
    ]
    return [
        pair,
        f"{TEMPERATURES[mode]:g}",
        METHODS[method].label,
        str(k),
        *rates_by_position,
        *[""] * (max_drafts - k),
        str(rates.tokens_per_step()),
        compared,
        *(f"{estimate.value:.2f}" for estimate in by_kind),
    ]


def measure_all(options: argparse.Namespace) -> None:
    if not options.gemma:
        common.log("SmolLM2 alone: the Gemma pair is measured with --gemma FOLDER")
    names = case_names(options)
    drafting.measure_kept(
        "universal", options, names, SETTINGS, lambda cases: show(cases, names, options.drafts), more=("gemma",)
    )


def main() -> int:
    options = parse_options()
    return drafting.run_main(options, lambda: measure(options), lambda: measure_all(options))
