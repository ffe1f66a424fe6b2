"""Measure tokens per target step for each drafter, acceptance rule and temperature.

python -m benchmarks speculation --json .bench/speculation.json

k is 3, and steps without drafts are included. The output is one Markdown table, with 95 % intervals from a bootstrap
over prompts: 24 repetitive prompts and eight fixed openings (on which the demo's drafters were trained). Equivalent
cases are omitted: at temperature 0, drafting is always greedy, and greedy or coupled drafts are always accepted under
the strict rule. Each case runs in an engine with its own process. Cases that the report already contains are not
measured again, so that an interrupted run can be continued.
"""

import argparse
from typing import Any, NamedTuple

from benchmarks.shared import common, drafting
from vllm_gaudi_spec.tools.demo_model import demo_model_path

NUM_DRAFTS = 3
TEMPERATURES = (0.0, 0.7, 1.0)
SETTINGS = ("tokens", "prompts", "batch_size")


class Drafter(NamedTuple):
    label: str
    config: dict[str, Any]
    is_model: bool = True
    learns: bool = False
    """Whether the drafter learns from earlier answers, so that each temperature needs a new drafter."""


class Way(NamedTuple):
    drafting: str
    rule: str
    config: dict[str, str]
    same_tokens: bool
    """Whether a seeded request has the same output as without speculation, and not only the same distribution."""


DRAFTERS = {
    "same-vocab": Drafter("draft model, same tokenizer", drafting.SAME_VOCAB),
    "other-vocab": Drafter("draft model, other tokenizer", drafting.OTHER_VOCAB),
    "ngram": Drafter("ngram", drafting.NGRAM, is_model=False),
    "suffix": Drafter("suffix", drafting.SUFFIX, is_model=False, learns=True),
}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
WAYS = {
    "greedy": Way("greedy", "any", {}, True),
    "coupled": Way("coupled", "any", {"draft_sample_method": "coupled", "rejection_sample_method": "strict"}, True),
    **{
        f"probabilistic-{rule}": Way(
            "probabilistic", rule, PROBABILISTIC | {"rejection_sample_method": rule}, rule == "strict"
        )
        for rule in ("strict", "standard", "block")
    },
}
CASES = [f"{drafter}/{way}" for drafter, facts in DRAFTERS.items() for way in (WAYS if facts.is_model else ["greedy"])]


def parse_options() -> argparse.Namespace:
    parser = drafting.parser_of(__doc__)
    drafting.add_acceptance_options(parser, "speculation.json")
    return parser.parse_args()


def temperatures(way: str) -> list[float]:
    return [temperature for temperature in TEMPERATURES if temperature or way == "greedy"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case at each temperature, in a child process."""
    name, way = options.part.split("/")
    drafter, model = DRAFTERS[name], demo_model_path()
    from vllm.tokenizers import get_tokenizer

    texts = [text for texts in drafting.prompt_sets(options.prompts).values() for text in texts]
    prompts = drafting.encode(get_tokenizer(model), texts, bos=False)
    groups = [[value] for value in temperatures(way)] if drafter.learns else [temperatures(way)]
    asked = {}
    for group in groups:
        with drafting.engine(
            model,
            {**drafter.config, **WAYS[way].config, "num_speculative_tokens": NUM_DRAFTS},
            max_model_len=max(map(len, prompts)) + options.tokens,
            max_num_seqs=options.batch_size,
            per_request_spec_decode_metrics="detailed",
        ) as llm:
            for temperature in group:
                asked[f"{temperature:g}"] = drafting.ask(llm, prompts, temperature, options.tokens, NUM_DRAFTS)
    return asked


def show(cases: dict[str, Any]) -> None:
    header = ["drafter", "drafting", "rule", "same output by seed", *(f"T = {value:g}" for value in TEMPERATURES)]
    rows = []
    for name in CASES:
        if name not in cases:
            continue
        drafter, way = name.split("/")
        facts = WAYS[way]
        cells = [cell(cases[name], f"{temperature:g}") for temperature in TEMPERATURES]
        rows.append([DRAFTERS[drafter].label, facts.drafting, facts.rule, "yes" if facts.same_tokens else "no", *cells])
    common.log(f"\nTokens per target step, k = {NUM_DRAFTS} [95 % interval]\n\n{common.markdown(header, rows)}")


def cell(asked: dict[str, Any], temperature: str) -> str:
    if temperature not in asked:
        return "as greedy"
    return str(drafting.Rates(asked[temperature]["requests"], NUM_DRAFTS).tokens_per_step())


def main() -> int:
    options = parse_options()
    return drafting.run_main(
        options,
        lambda: measure(options),
        lambda: drafting.measure_kept("speculation", options, CASES, SETTINGS, show),
    )
