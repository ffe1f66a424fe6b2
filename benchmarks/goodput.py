"""What the goodput rule promises: with it, drafting is never much slower than not to draft.

python benchmarks/goodput.py --json .bench/goodput.json

For each method three engines live side by side, each in a process of its own, and take turns: no speculation, the
method alone, and the method with the rule. A turn is one batch of the eight fixed openings, past any end token. The
first turns of a batch size are those in which the rule learns; they are reported apart. Ratios are of neighbouring
turns.
"""

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import common
import numpy as np
import speculation_common as shared

METHODS: dict[str, dict[str, Any]] = {
    "ngram": shared.NGRAM,
    "suffix": shared.SUFFIX,
    "draft_model": shared.SAME_VOCAB,
    "universal": shared.OTHER_VOCAB,
    "eagle": {"method": "eagle", "model": str(shared.DEMO / "eagle-head")},
}
RULE = {"additional_config": {"gaudi_spec": {"goodput": True}}}
PROMISED = 0.97


def parse_options() -> argparse.Namespace:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--drafts", type=int, default=3, metavar="K")
    parser.add_argument("--tokens", type=int, default=64, help="per prompt")
    parser.add_argument("--learn", type=int, default=3, metavar="N", help="turns before those that count")
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="turns that count")
    parser.add_argument("--model", help="folder (default: the demo model)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


# ---- in the child processes ----------------------------------------------------------------------------


def serve(
    pipe: Connection, model: str, speculative_config: dict[str, Any] | None, options: dict[str, Any], log: str
) -> None:
    """Answer each (batch, tokens) with the seconds that it took and the steps that the rule left without drafts."""
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(shared.IN_PROCESS)
    from vllm import SamplingParams
    from vllm.tokenizers import get_tokenizer

    prompts = shared.encode(get_tokenizer(model), shared.prompt_sets()["openings"], bos=False)
    with shared.engine(model, speculative_config, max_model_len=512, **options) as llm:
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            batch, tokens = asked
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            wanted = [{"prompt_token_ids": prompts[place % len(prompts)]} for place in range(batch)]
            started = time.perf_counter()
            llm.generate(wanted, sampling, use_tqdm=False)
            pipe.send((time.perf_counter() - started, spared(llm)))


def spared(llm: Any) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:gaudi_spec_spared_steps")


# ---- in the parent -------------------------------------------------------------------------------------


class Engine:
    def __init__(self, name: str, model: str, speculative_config: dict[str, Any] | None, **options: Any) -> None:
        common.LOGS.mkdir(exist_ok=True)
        self._pipe, theirs = multiprocessing.Pipe()
        log = common.LOGS / f"goodput-{name.replace('/', '-')}.log"
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, model, speculative_config, options, str(log)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer(log)
        self._log = log

    def _answer(self, log: Path) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"an engine died; its last words are in {log}") from None

    def turn(self, batch: int, tokens: int) -> tuple[float, int]:
        self._pipe.send((batch, tokens))
        answer: tuple[float, int] = self._answer(self._log)
        return answer

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(60)


def measure(method: str, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    config = {**METHODS[method], "num_speculative_tokens": options.drafts}
    rows = max(options.batches)
    engines = {
        "plain": Engine(f"{method}/plain", model, None, max_num_seqs=rows),
        "alone": Engine(f"{method}/alone", model, config, max_num_seqs=rows),
        "ruled": Engine(f"{method}/ruled", model, config, max_num_seqs=rows, **RULE),
    }
    answers = []
    try:
        for batch in options.batches:
            turns: list[dict[str, float]] = []
            for _ in range(options.learn + options.turns):
                order = list(engines) if len(turns) % 2 else list(reversed(engines))
                taken = {name: engines[name].turn(batch, options.tokens) for name in order}
                turns.append({**{name: seconds for name, (seconds, _) in taken.items()}, "spared": taken["ruled"][1]})
            answers.append({"method": method, "batch": batch, "turns": turns, **figures(turns, options)})
            common.say(f"{method}, batch {batch}: {answers[-1]['ruled'][0]:.2f} of no speculation with the rule")
    finally:
        for engine in engines.values():
            engine.close()
    return answers


def figures(turns: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    learnt, first = turns[options.learn :], turns[: options.learn]
    begin = first[-1]["spared"] if first else 0
    return {
        "alone": ratio(learnt, "alone"),
        "ruled": ratio(learnt, "ruled"),
        "ruled_while_learning": geometric_mean([turn["plain"] / turn["ruled"] for turn in first]) if first else None,
        "spared_steps": learnt[-1]["spared"] - begin,
    }


def ratio(turns: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """Speed over that without speculation, and its 95 % interval over turns."""
    logs = np.log([turn["plain"] / turn[name] for turn in turns])
    picks = np.random.default_rng(0).integers(len(logs), size=(shared.RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[picks].mean(1), [2.5, 97.5]))
    return float(np.exp(logs.mean())), float(low), float(high)


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.demo_model import demo_model_path

    common.warn_if_busy()
    model = options.model or demo_model_path()
    rows = [row for method in options.methods for row in measure(method, model, options)]
    show(rows, options)
    settings = {name: getattr(options, name) for name in ("drafts", "tokens", "learn", "turns")}
    common.write_json(options.json, {**settings, "rows": rows, "machine": common.describe_machine()})


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    def interval(value: tuple[float, float, float]) -> str:
        return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"

    lines = [
        [
            row["method"],
            str(row["batch"]),
            interval(row["alone"]),
            interval(row["ruled"]),
            "" if row["ruled_while_learning"] is None else f"{row['ruled_while_learning']:.2f}",
            str(row["spared_steps"]),
            "yes" if row["ruled"][2] >= PROMISED else "NO",
        ]
        for row in rows
    ]
    header = ["method", "batch", "drafting always", "with the rule", "while it learned", "steps spared", "kept"]
    common.say(f"\nspeed over no speculation, k = {options.drafts}, float32\n\n{shared.markdown(header, lines)}")
    common.say(f"\nkept: the interval does not lie below {PROMISED}\n\n{common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    return shared.run_main(options, lambda: None, lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
