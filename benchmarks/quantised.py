"""What a quantised checkpoint gives and takes: the demo model in formats of compressed-tensors, on a CPU.

python benchmarks/quantised.py --json .bench/quantised.json

The package compressed-tensors makes the checkpoints: rounding to nearest, no calibration. For each format these live
side by side, each in processes of its own, and take turns: the demo model in --dtype and in bfloat16, the checkpoint
with reference kernels, with native ones, and on upstream's CPU platform. What does not start is shown with its reason.
A turn is one batch of fixed prompts, greedy, past any end token. Then each runs with each of the demo's drafters.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import common
import speculation_common as shared
import torch
from common import PLATFORMS, QUIET
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import Engine, interval, parser_of, ratio, side_by_side, take

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, NATIVE, REFERENCE
from vllm_gaudi_spec.tools.demo_model import demo_model_path

PLAIN, HALF, UPSTREAM = "not quantised", "not quantised, bfloat16", "upstream"
FORMATS = ("FP8_DYNAMIC", "W8A8", "W4A16")
"""Presets of compressed-tensors."""
GROUP = 64  # divides all sizes of the demo model, which the preset's 128 does not
SIZES: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
DRAFTERS = {
    "same vocabulary": shared.SAME_VOCAB,
    # As upstream spells it too.
    "other vocabulary": shared.OTHER_VOCAB | {"method": "draft_model", "use_heterogeneous_vocab": True},
    "EAGLE head": shared.EAGLE,
}
Side = tuple[str, str, dict[str, Any]]
"""Whose platform, the model, and further options of its engine."""
Steps = dict[str, dict[str, float | str]]
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=4)
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT", help="formats to measure"
    )
    parser.add_argument("--dtype", default="float32", help="of activations, and of the model beside them")
    return parser.parse_args()


# ---- checkpoints ---------------------------------------------------------------------------------------


def checkpoint(model: str, name: str) -> Path:
    """The model in a format, made unless it is there."""
    folder = common.LOGS / "checkpoints" / f"{Path(model).name}-{name}"
    if not folder.exists():
        common.log(f"making {folder} ...")
        draft = folder.with_suffix(".tmp")
        write(model, name, draft)
        draft.replace(folder)
    return folder


@torch.no_grad()
def write(model: str, name: str, folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    scheme = preset_name_to_scheme(name, ["Linear"])
    if scheme.weights.group_size is not None:
        scheme.weights.group_size = GROUP
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(loaded, config)
    for module in loaded.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            groups = module.weight.unflatten(1, (-1, scheme.weights.group_size or module.weight.shape[1]))
            scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
            module.weight_scale.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(loaded)
    compressor.compress_model(loaded)
    loaded.save_pretrained(folder)
    compressor.update_config(str(folder))
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


# ---- measuring -----------------------------------------------------------------------------------------


def measure(name: str, model: str, options: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    """`steps`: tokens of a step, kept by side: those of the model that is not quantised serve all formats."""
    folder = str(checkpoint(model, name))
    sides: dict[str, Side] = {
        PLAIN: ("ours", model, {}),
        HALF: ("ours", model, {"dtype": "bfloat16"}),
        REFERENCE: ("ours", folder, kernels(REFERENCE)),
        NATIVE: ("ours", folder, kernels(NATIVE)),
        UPSTREAM: ("upstream", folder, {}),
    }
    refused: dict[str, str] = {}
    with side_by_side() as engines:
        for side, (platform, of, more) in sides.items():
            common.log(f"{name}: starting {side} ...")
            try:
                engines[side] = started(log_name(name, side), platform, of, options, **more)
                engines[side].turn(1, 2)  # vLLM looks for some kernels when it needs them
            except RuntimeError as error:
                refused[side] = str(error)
                if side in engines:
                    engines.pop(side).close()
        batches = []
        for batch in options.batches:
            take(engines, 1, lambda engine, batch=batch: engine.turn(batch, 16))
            turns = take(engines, options.turns, lambda engine, batch=batch: engine.turn(batch, options.tokens))
            texts = {side: engine.texts for side, engine in engines.items()}
            batches.append({"batch": batch, "turns": turns, "same": {side: same(texts, side) for side in texts}})
        resident = {side: engine.resident_bytes() for side, engine in engines.items()}
    for side in resident:
        if (log := log_name(name, side)) not in steps:
            common.log(f"{name}: drafts for {side} ...")
            steps[log] = {drafter: drafted(log, sides[side], drafter, options) for drafter in DRAFTERS}
    return {
        "format": name,
        "bytes": sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")),
        "refused": refused,
        "batches": batches,
        "resident": resident,
        "tokens_a_step": {side: steps[log_name(name, side)] for side in resident},
    }


def log_name(name: str, side: str) -> str:
    return f"quantised-{side}" if side in (PLAIN, HALF) else f"quantised-{name}-{side}"


def kernels(which: str) -> dict[str, Any]:
    return {"additional_config": {ADDITIONAL_CONFIG_KEY: {"weight_kernels": which}}}


def started(log: str, platform: str, model: str, options: argparse.Namespace, **more: Any) -> Engine:
    settings = SIZES | {"dtype": options.dtype, "max_num_seqs": max(options.batches), **more}
    environment = {**QUIET, **PLATFORMS[platform], "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine = Engine(log, model, environment, options.texts, enforce_eager=platform == "upstream", **settings)
    common.check_platform(platform, engine.platform)
    return engine


def same(texts: dict[str, list[list[int]]], side: str) -> float:
    """Of the tokens of the reference kernels' texts, up to the first that differs."""
    pairs = zip(texts[side], texts[REFERENCE], strict=True)
    equal = [next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    return sum(equal) / sum(map(len, texts[side]))


def drafted(log: str, what: Side, drafter: str, options: argparse.Namespace) -> float | str:
    """Tokens of a step that verified something, or why there are none."""
    platform, model, more = what
    config = {**DRAFTERS[drafter], "num_speculative_tokens": options.drafts}
    with side_by_side() as engines:
        try:
            engine = started(f"{log}-{drafter}", platform, model, options, speculative_config=config, **more)
            engines[drafter] = engine
            engine.turn(max(options.batches), options.tokens)
        except RuntimeError as error:
            return str(error)
        return 1 + engine.counter(ACCEPTED) / engine.counter(DRAFTS)


# ---- showing -------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines, drafts = [], []
    for row in rows:
        for side in row["resident"]:
            steps = row["tokens_a_step"][side].values()
            drafts.append([row["format"], side, *(one if isinstance(one, str) else f"{one:.2f}" for one in steps)])
            for cell in row["batches"]:
                rate = cell["batch"] * options.tokens / median(turn[side] for turn in cell["turns"])
                lines.append(
                    [
                        row["format"],
                        side,
                        str(cell["batch"]),
                        f"{rate:.1f}",
                        interval(ratio(cell["turns"], side, PLAIN)) if side != PLAIN else "",
                        f"{cell['same'][side]:.2f}",
                        f"{row['resident'][side] >> 20}",
                    ]
                )
        lines += [[row["format"], side, reason, *[""] * 4] for side, reason in row["refused"].items()]
    header = ["format", "kernels", "batch", "tokens/s", f"to {PLAIN}", "same text", "resident MiB"]
    common.log(f"\n{options.dtype}, {options.tokens} tokens a prompt, k = {options.drafts}\n")
    common.log(shared.markdown(header, lines))
    common.log("\nTokens of a step that verified something:\n")
    common.log(shared.markdown(["format", "kernels", *DRAFTERS], drafts))
    common.log(f"\n{common.NOISE_NOTE}")


def main() -> int:
    options = parse_options()
    common.warn_if_busy()
    rows: list[dict[str, Any]] = []
    steps: Steps = {}

    def whole() -> None:
        model = options.model or demo_model_path()
        rows.extend(measure(name, model, options, steps) for name in options.formats)
        show(rows, options)
        common.write_rows(options, ("batches", "tokens", "turns", "texts", "dtype", "drafts"), rows)

    return shared.run_whole(whole)


if __name__ == "__main__":
    sys.exit(main())
