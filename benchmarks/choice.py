"""Whether calibration/choose_speculation.py chooses well: its k at each batch size beside the speed of every k, served.

python benchmarks/choice.py --json .bench/choice.json

The script chooses among numbers of drafts of one draft model. Then, for each batch size, engines with each of them
and one without drafts live side by side, each in a process of its own, and take turns; a turn serves the openings,
past any end token. What a choice loses is its distance to the fastest of them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import speculation_common as shared
from turns import Engine, interval, parser_of, ratio, side_by_side, take

FAST_ENOUGH = 0.95


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=3, drafts_help="drafts per step: every number from 0 to K")
    parser.set_defaults(batches=[1, 4, 16], texts="openings", drafts=6)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep there what the script measured (default: a temporary folder)"
    )
    return parser.parse_args()


def chosen(model: str, options: argparse.Namespace, folder: Path) -> dict[int, int]:
    """By batch size, of the draft model's candidates alone; 0 where none of them gains."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(shared.texts_named(options.texts)) + "\n")
    command = [sys.executable, str(common.ROOT / "calibration" / "choose_speculation.py"), model]
    command += ["--draft", f"draft_model={shared.SAME_VOCAB['model']}", "--prompts", str(prompts), "--out", str(folder)]
    command += [
        "--num-speculative-tokens",
        *map(str, range(1, options.drafts + 1)),
        "--batches",
        *map(str, options.batches),
    ]
    command += ["--output-len", str(options.tokens), "--turns", str(options.turns)]
    subprocess.run([*command, "--engine", json.dumps({"dtype": "float32"})], check=True)
    answer = json.loads((folder / "choice.json").read_text())
    candidates = [found for found in answer["candidates"] if found["method"] == "draft_model"]
    choice = {}
    for index, batch in enumerate(options.batches):
        speedups = {found["num_speculative_tokens"]: found["by_batch"][index]["speedup"] for found in candidates}
        best = max(speedups, key=lambda k: speedups[k])
        choice[batch] = best if speedups[best] > 1 else 0
    return choice


def measure(batch: int, model: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Turns: seconds by number of drafts."""
    requests = max(batch, len(shared.texts_named(options.texts)))
    with side_by_side() as engines:
        for k in range(options.drafts + 1):
            settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": batch}
            if k:
                settings["speculative_config"] = {**shared.SAME_VOCAB, "num_speculative_tokens": k}
            engines[str(k)] = Engine(f"choice-{batch}-{k}", model, shared.IN_PROCESS, options.texts, **settings)
        take(engines, 1, lambda engine: engine.turn(batch, 16))
        return take(engines, options.turns, lambda engine: engine.turn(requests, options.tokens))


def row_of(batch: int, k: int, turns: list[dict[str, float]]) -> dict[str, Any]:
    ratios = {name: ratio(turns, name, "0") for name in turns[0]}
    fastest = max(ratios, key=lambda name: ratios[name][0])
    return {
        "batch": batch,
        "chosen": k,
        "fastest": int(fastest),
        "beside_fastest": ratio(turns, str(k), fastest),
        "ratios": ratios,
        "turns": turns,
    }


def measure_all(options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.demo_model import demo_model_path

    common.warn_if_busy()
    model = options.model or str(demo_model_path())
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        choice = chosen(model, options, folder.resolve())
    rows = []
    for batch in options.batches:
        rows.append(row_of(batch, choice[batch], measure(batch, model, options)))
        speeds = ", ".join(f"k = {k} {interval(value)}" for k, value in rows[-1]["ratios"].items())
        common.log(f"batch {batch}: chosen {choice[batch]}; {speeds}")
    header = [
        "batch",
        *(f"k = {k}" for k in range(1, options.drafts + 1)),
        "fastest",
        "chosen",
        "chosen / fastest",
        "",
    ]
    lines = [
        [
            str(row["batch"]),
            *(f"{row['ratios'][str(k)][0]:.2f}" for k in range(1, options.drafts + 1)),
            str(row["fastest"]),
            str(row["chosen"]),
            "1" if row["chosen"] == row["fastest"] else interval(row["beside_fastest"]),
            "yes" if row["beside_fastest"][0] >= FAST_ENOUGH else "no",
        ]
        for row in rows
    ]
    common.log(f"\nSpeed over that without drafts, served\n\n{shared.markdown(header, lines)}\n\n{common.NOISE_NOTE}")
    common.write_rows(options, ("tokens", "turns", "texts"), rows)


def main() -> int:
    options = parse_options()
    return shared.run_whole(lambda: measure_all(options))


if __name__ == "__main__":
    sys.exit(main())
