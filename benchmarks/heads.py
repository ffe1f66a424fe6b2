"""The demo EAGLE head on this platform: beside its reference figures, upstream's CPU platform and plain decoding.

python benchmarks/heads.py --json .bench/heads.json

float32, temperature 0. The prompts are those of the reference evaluation (demo/README.md, a plain loop without an
engine): 40 questions out of the training's template at k = 3, and prompts held out from training at k = 1 to 5. Of the
256 prompts held out, --held-out takes the first of both kinds, chat and plain, in the same shares and order.

All sides count by the rule of the reference: tokens per step are those that verifying steps yielded, by such steps. A
request's first token comes out of its prompt and is not counted, neither as a token nor as a step. After it, each
step yields its accepted drafts and one token more, and counts in full while the text before it has neither the end
token nor --output-len tokens; so a last step may go past either. Engines would cut that step off, or draft less in it:
here they ignore the end token and have room for k tokens more, and `by_reference` finds in each request's account,
step by step, where the reference would have stopped. A counted step that did not draft k tokens is an error.

Intervals are 95 %, a bootstrap over the prompts. "inside": the reference, as rounded, lies in our interval. "ours -
upstream" is resampled in pairs, prompt by prompt; "below" is YES where all of its interval is below 0. Texts are
compared with plain decoding of our engine, whole, also after an end token; "tied": at the first difference the two
tokens' log-probabilities lie within 1e-4 of each other.

Each case is an engine in a process of its own, never two at once. What the report has already is not measured again.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import speculation_common as shared
from common import PLATFORMS, QUIET, check_platform
from speculation_common import Estimate

from vllm_gaudi_spec.tools.demo_model import demo_model_path
from vllm_gaudi_spec.tools.io.command_line import add_shared

QUESTIONS, HELD_OUT = "out of template", "held out"
# Tokens per step, then the share of steps with at least 1, 2, ... accepted drafts.
REFERENCE: dict[tuple[str, int], tuple[float, ...]] = {
    (QUESTIONS, 3): (1.90, 0.512, 0.247, 0.137),
    (HELD_OUT, 1): (1.65, 0.647),
    (HELD_OUT, 2): (2.04, 0.631, 0.406),
    (HELD_OUT, 3): (2.28, 0.621, 0.392, 0.267),
    (HELD_OUT, 4): (2.44, 0.616, 0.383, 0.254, 0.182),
    (HELD_OUT, 5): (2.53, 0.608, 0.372, 0.246, 0.173, 0.128),
}
COMPARED_K = 3  # with upstream and plain decoding, and on the questions out of the template
# No speeds are measured here, and where other work wants the cores, threads that spin for each other cost tenfold.
PATIENT = {"OMP_WAIT_POLICY": "passive"}
END_OF_TURN = 2
TIE = 1e-4

# How the reference chose its prompts; the rest of it stands in demo/.
NUM_CHAT, NUM_PLAIN, SEED = 30000, 11000, 0
NUM_HELD_OUT, CHAT_SHARE, LONGEST_PROMPT = 256, 0.7, 96

QUICK = {"questions": 8, "held_out": 8, "drafts": [COMPARED_K]}
SETTINGS = ("head", "questions", "held_out", "num_drafts", "tokens", "batch_size")


def parse_options() -> argparse.Namespace:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--head", default=str(shared.DEMO / "eagle-head"), metavar="FOLDER", help="the EAGLE head")
    parser.add_argument(
        "--questions", type=int, default=40, metavar="N", help="questions out of the training's template"
    )
    parser.add_argument(
        "--held-out", type=int, default=64, metavar="N", help=f"prompts held out from training, at most {NUM_HELD_OUT}"
    )
    add_shared(
        parser.add_argument,
        "--num-speculative-tokens",
        dest="num_drafts",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4, 5],
        choices=range(1, 6),
        metavar="K",
        help="numbers of drafts per step",
    )
    parser.add_argument("--quick", action="store_true", help="8 prompts of each kind, k = 3 alone: to see it work")
    add_shared(
        parser.add_argument,
        "--output-len",
        dest="tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens per prompt; the reference's figures are for 128",
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="concurrency")
    parser.add_argument("--fresh", action="store_true", help="measure again what the report has already")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        default=common.LOGS / "heads.json",
        help="the report, which keeps finished cases",
    )
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    return options


def case_names(drafts: Sequence[int]) -> list[str]:
    """What each engine drafts; 0 is plain decoding."""
    others = [k for k in drafts if k != COMPARED_K]
    return [f"ours/{COMPARED_K}", f"upstream/{COMPARED_K}", "ours/0", *(f"ours/{k}" for k in others)]


def sets_of(k: int, drafts: Sequence[int]) -> list[str]:
    if k == 0:
        return [QUESTIONS]
    return [QUESTIONS] * (k == COMPARED_K) + [HELD_OUT] * (k in drafts)


# ---- prompts -------------------------------------------------------------------------------------------


def reference_texts(num_questions: int, num_held_out: int) -> dict[str, list[str]]:
    sys.path.append(str(shared.DEMO))
    from sampling import choose_held_out
    from training_prompts import OUT_OF_TEMPLATE, as_chat, build_prompts

    chat, plain = build_prompts(NUM_CHAT, NUM_PLAIN, SEED)
    texts = chat + plain
    held_out = np.flatnonzero(choose_held_out(len(chat), len(texts), np.random.default_rng(SEED))).tolist()
    rng, all_chat = random.Random(0), int(NUM_HELD_OUT * CHAT_SHARE)
    chosen_chat = rng.sample([texts[i] for i in held_out if i < len(chat)], all_chat)
    chosen_plain = rng.sample([texts[i] for i in held_out if i >= len(chat)], NUM_HELD_OUT - all_chat)
    num_chat = int(num_held_out * CHAT_SHARE)
    return {
        QUESTIONS: [as_chat(question) for question in OUT_OF_TEMPLATE[:num_questions]],
        HELD_OUT: chosen_chat[:num_chat] + chosen_plain[: num_held_out - num_chat],
    }


def encode(model: str, texts: list[str]) -> list[list[int]]:
    from vllm.tokenizers import get_tokenizer

    return [ids[:LONGEST_PROMPT] for ids in shared.encode(get_tokenizer(model), texts, bos=False)]


# ---- in the child processes ----------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One case: for each set of prompts, what every request counted."""
    platform, k = options.part.split("/")[0], int(options.part.split("/")[1])
    check_platform(platform)
    model, texts = demo_model_path(), reference_texts(options.questions, options.held_out)
    prompts = {name: encode(model, texts[name]) for name in sets_of(k, options.num_drafts)}
    # The reference's last step begins with one token missing, and yields k + 1.
    room = options.tokens + (k or COMPARED_K)
    longest = max(len(ids) for some in prompts.values() for ids in some)
    speculation = {"method": "eagle", "model": options.head, "num_speculative_tokens": k}
    accounts = {"per_request_spec_decode_metrics": "detailed"} if k else {}
    with shared.engine(
        model,
        speculation if k else None,
        enforce_eager=platform == "upstream",
        max_model_len=longest + room + k + 1,
        max_num_seqs=options.batch_size,
        **accounts,
    ) as llm:
        return {name: ask(llm, some, k, room, options.tokens) for name, some in prompts.items()}


def ask(llm: Any, prompts: list[list[int]], k: int, room: int, tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True, logprobs=None if k else 5)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    completions = [output.outputs[0] for output in outputs]
    answer: dict[str, Any] = {"seconds": seconds, "token_ids": [list(each.token_ids) for each in completions]}
    if k:
        answer["requests"] = [counts(each, k, tokens) for each in completions]
    else:
        answer["ties"] = [ties(each) for each in completions]
    return answer


def counts(completion: Any, k: int, tokens: int) -> dict[str, Any]:
    metrics = completion.spec_decode_metrics
    drafted, accepted = list(metrics.per_step_drafted), list(metrics.per_step_accepted)
    return by_reference(list(completion.token_ids), drafted, accepted, k, tokens)


def ties(completion: Any) -> dict[str, list[int]]:
    """By position: the tokens as good as the best, where there is more than the best."""
    found = {}
    for position, (chosen, candidates) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True),
    ):
        best = candidates[chosen].logprob
        close = [token for token, facts in candidates.items() if best - facts.logprob <= TIE]
        if len(close) > 1:
            found[str(position)] = close
    return found


# ---- counting ------------------------------------------------------------------------------------------


def by_reference(
    token_ids: Sequence[int], drafted: Sequence[int], accepted: Sequence[int], k: int, tokens: int
) -> dict[str, Any]:
    """The steps that the reference would have taken, out of those of a request that went on for k tokens more."""
    # The engine's account leaves out steps without drafts. There may be one at the end, with room for one token.
    if 1 + sum(accepted) + len(accepted) < len(token_ids) - 1:
        raise RuntimeError("steps without drafts: they cannot be placed, and so not be counted")
    length, counted = 1, 0
    while length < tokens and END_OF_TURN not in token_ids[:length]:
        if counted == len(drafted) or drafted[counted] != k:
            raise RuntimeError(f"after {length} tokens a step drafted less than {k}")
        length += accepted[counted] + 1
        counted += 1
    return {"tokens": length - 1, "steps": counted, "accepted": list(accepted[:counted])}


class Rates(shared.Rates):
    """Tokens per step, then the positions: by themselves, and less those of another run of the same prompts."""

    def figures(self) -> list[Estimate]:
        return [estimate(*pair) for pair in zip(self._values(), self._resamples(), strict=True)]

    def less(self, other: "Rates") -> list[Estimate]:
        values, resamples = self._values() - other._values(), self._resamples() - other._resamples()
        return [estimate(*pair) for pair in zip(values, resamples, strict=True)]

    def _counts(self) -> np.ndarray:
        return np.vstack([self._tokens_N, self._at_KN])

    def _values(self) -> np.ndarray:
        return self._counts().sum(axis=1) / self._steps_N.sum()

    def _resamples(self) -> np.ndarray:
        return (self._counts() @ self._weights_SN.T) / (self._weights_SN @ self._steps_N)


def estimate(value: float, resampled_S: np.ndarray) -> Estimate:
    low, high = np.percentile(resampled_S, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def is_inside(found: Estimate, reference: float, digits: int) -> bool:
    """The reference is known to so many digits only."""
    half = 0.5 * 10**-digits
    return found.low - half <= reference <= found.high + half


def conclusion(plain: Sequence[int], ties: dict[str, list[int]], ours: Sequence[int]) -> str:
    first = next((i for i, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b), None)
    if first is None:
        return "equal"
    return "tied" if ours[first] in ties.get(str(first), []) else "different"


# ---- in the parent -------------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> None:
    settings = {name: getattr(options, name) for name in SETTINGS}
    stored = shared.Kept.open(options.json, settings, options.fresh)
    common.warn_if_busy()
    names = [name for name in case_names(options.num_drafts) if name not in stored.cases]
    for index, name in enumerate(names, 1):
        common.log(f"[{index}/{len(names)}] {described(name)} ...")
        started = time.perf_counter()
        answer = common.run_part(
            Path(__file__),
            ["--part", name, *shared.cli(options, *SETTINGS)],
            log_name=f"heads-{name.replace('/', '-')}",
            environment={**QUIET, **PATIENT, **PLATFORMS[name.split("/")[0]]},
            seconds=1800,
        )
        stored.add(name, answer)
        common.log(f"      {time.perf_counter() - started:.0f} s")
    rows, texts = rows_of(stored.cases, options.num_drafts), compare_texts(stored.cases)
    show(rows, texts, options)
    report = {"settings": settings, "rows": rows, "texts": texts, "machine": common.describe_machine()}
    common.write_json(options.json, {**report, "cases": stored.cases})


def described(name: str) -> str:
    platform, k = name.split("/")
    return f"{platform}, k = {k}" if k != "0" else f"{platform}, plain decoding"


def rows_of(cases: dict[str, Any], drafts: Sequence[int]) -> list[dict[str, Any]]:
    """One row per figure."""
    rows = []
    for (name, k), reference in REFERENCE.items():
        if name not in sets_of(k, drafts):
            continue
        requests = cases[f"ours/{k}"][name]["requests"]
        ours = Rates(requests, k)
        upstream = Rates(cases[f"upstream/{k}"][name]["requests"], k) if k == COMPARED_K else None
        others, beyond = (upstream.figures(), ours.less(upstream)) if upstream else ([None] * (k + 1),) * 2
        for index, figure in enumerate(ours.figures()):
            expected, theirs, more = reference[index], others[index], beyond[index]
            rows.append(
                {
                    "prompts": name,
                    "num_prompts": len(requests),
                    "k": k,
                    "figure": f"position {index}" if index else "tokens per step",
                    "ours": vars(figure),
                    "reference": expected,
                    "inside": is_inside(figure, expected, digits_of(index)),
                    "upstream": vars(theirs) if theirs else None,
                    "ours_less_upstream": vars(more) if more else None,
                    "not_below_upstream": more.high >= 0 if more else None,
                    "steps": {
                        side: sum(each["steps"] for each in cases[f"{side}/{k}"][name]["requests"])
                        for side in (PLATFORMS if upstream else ["ours"])
                    },
                }
            )
    return rows


def digits_of(index: int) -> int:
    return 3 if index else 2


def compare_texts(cases: dict[str, Any]) -> dict[str, dict[str, int]]:
    plain = cases["ours/0"][QUESTIONS]
    texts = {}
    for platform in PLATFORMS:
        theirs = cases[f"{platform}/{COMPARED_K}"][QUESTIONS]["token_ids"]
        found = [conclusion(*each) for each in zip(plain["token_ids"], plain["ties"], theirs, strict=True)]
        texts[platform] = {name: found.count(name) for name in ("equal", "tied", "different")}
    return texts


def show(rows: list[dict[str, Any]], texts: dict[str, dict[str, int]], options: argparse.Namespace) -> None:
    header = ["prompts", "k", "figure", "ours [95 %]", "reference", "inside", "upstream [95 %]"]
    header += ["ours - upstream [95 %]", "below"]
    lines = []
    for row in rows:
        digits = 2 if row["figure"] == "tokens per step" else 3
        lines.append(
            [
                f"{row['prompts']} ({row['num_prompts']})",
                str(row["k"]),
                row["figure"],
                with_interval(row["ours"], digits),
                f"{row['reference']:.{digits}f}",
                "yes" if row["inside"] else "NO",
                with_interval(row["upstream"], digits),
                with_interval(row["ours_less_upstream"], 3),
                {None: "", True: "no", False: "YES"}[row["not_below_upstream"]],
            ]
        )
    common.log(f"\nfloat32, temperature 0, {options.tokens} tokens\n\n{shared.markdown(header, lines)}\n")
    for row in rows:
        if row["figure"] == "tokens per step":
            steps = ", ".join(f"{side} {num}" for side, num in row["steps"].items())
            common.log(f"target steps, {row['prompts']}, k = {row['k']}: {steps}")
    for platform, found in texts.items():
        conclusions = ", ".join(f"{num} {name}" for name, num in found.items())
        common.log(f"texts of {platform}, {QUESTIONS}, k = {COMPARED_K}, against our plain decoding: {conclusions}")
    if (options.held_out, options.questions, options.tokens) != (NUM_HELD_OUT, 40, 128):
        common.log(f"The reference is for {NUM_HELD_OUT} prompts held out, 40 questions, and 128 tokens.")


def with_interval(found: dict[str, float] | None, digits: int) -> str:
    if found is None:
        return ""
    value, low, high = (f"{found[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def main() -> int:
    options = parse_options()
    return shared.run_main(options, lambda: measure(options), lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
