"""What a quantised checkpoint gives and takes: the demo model in formats of compressed-tensors, on a CPU.

python benchmarks/quantised.py

The package compressed-tensors makes the checkpoints: rounding to nearest, no calibration. For each format these live
side by side, each in processes of its own, and take turns: the demo model in --dtype and in bfloat16, the checkpoint
with reference kernels, with native ones, and on upstream's CPU platform. What does not start is shown with its reason.
A turn is one batch of fixed prompts, greedy, past any end token. Texts are compared with those that transformers
generates in float32 with the weights that compressed-tensors makes of the checkpoint. Then each runs with each of the
demo's drafters. The report is written after each batch and each drafter, and what it has is not measured again.
"""

import argparse
import re
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from turns import Engine, Turn, interval, parser_of, ratio, side_by_side, take

from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, NATIVE, REFERENCE
from vllm_gaudi_spec.tools.demo_model import demo_model_path

PLAIN, HALF, UPSTREAM = "not quantised", "not quantised, bfloat16", "upstream"
FORMATS = ("FP8_DYNAMIC", "W8A8", "W4A16")
"""Presets of compressed-tensors."""
GROUP = 64  # divides all sizes of the demo model, which the preset's 128 does not
SIZES: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
DRAFTERS: dict[str, dict[str, Any]] = {
    "same vocabulary": shared.SAME_VOCAB,
    # As upstream spells it too.
    "other vocabulary": shared.OTHER_VOCAB | {"method": "draft_model", "use_heterogeneous_vocab": True},
    "EAGLE head": shared.EAGLE,
}
Side = tuple[str, str, dict[str, Any]]
"""Whose platform, the model, and further options of its engine."""
Texts = list[list[int]]
WARM_UP = 8
"""Tokens."""
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, turns=4)
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT", help="formats to measure"
    )
    parser.add_argument(
        "--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), metavar="NAME", help="drafters to run with"
    )
    parser.add_argument("--dtype", default="float32", help="of activations, and of the model beside them")
    parser.add_argument("--fresh", action="store_true", help="measure again what the report has already")
    parser.set_defaults(json=common.LOGS / "quantised.json", batches=[1, 4])
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


@torch.no_grad()
def dequantised_texts(folder: Path, options: argparse.Namespace) -> Texts:
    """Of the largest batch, by transformers: rounding of activations is left out."""
    quantised = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ModelCompressor.from_pretrained_model(quantised).decompress_model(quantised)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = quantised.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    prompts = shared.encode(AutoTokenizer.from_pretrained(folder), shared.texts_named(options.texts), bos=False)
    plain.generation_config.eos_token_id = None  # past it, as engines are asked to
    texts = []
    for at in range(max(options.batches)):
        prompt = torch.tensor([prompts[at % len(prompts)]])
        ones = torch.ones_like(prompt)
        made = plain.generate(prompt, attention_mask=ones, do_sample=False, max_new_tokens=options.tokens)
        texts.append(made[0, prompt.shape[1] :].tolist())
    return texts


# ---- measuring -----------------------------------------------------------------------------------------


def measure(name: str, model: str, options: argparse.Namespace, kept: shared.Kept) -> None:
    """What of a format the report lacks. Drafts for the model that is not quantised serve all formats."""
    folder = checkpoint(model, name)
    sides: dict[str, Side] = {
        PLAIN: ("ours", model, {}),
        **({} if options.dtype == "bfloat16" else {HALF: ("ours", model, {"dtype": "bfloat16"})}),
        REFERENCE: ("ours", str(folder), kernels(REFERENCE)),
        NATIVE: ("ours", str(folder), kernels(NATIVE)),
        UPSTREAM: ("upstream", str(folder), {}),
    }
    if batches := [batch for batch in options.batches if cell_name(name, batch) not in kept.cases]:
        common.log(f"{name}: texts of transformers ...")
        texts = dequantised_texts(folder, options)
        with side_by_side() as engines:
            refused = start(name, sides, engines, options)
            for batch in batches:
                common.log(f"{name}: {batch} at once ...")
                cell = turns_of(engines, batch, options)
                kept.add(cell_name(name, batch), cell | {"dequantised": texts[:batch], "refused": refused})
    for side in kept.cases[cell_name(name, options.batches[0])]["resident"]:
        for drafter in options.drafters:
            if (case := drafts_name(name, side, drafter)) not in kept.cases:
                common.log(f"{case} ...")
                kept.add(case, drafted(case, sides[side], drafter, options))


def start(name: str, sides: dict[str, Side], engines: dict[str, Engine], options: argparse.Namespace) -> dict[str, str]:
    """Fills `engines`; returns why some of the sides cannot run."""
    refused: dict[str, str] = {}
    for side, (platform, of, more) in sides.items():
        common.log(f"{name}: starting {side} ...")
        try:
            engines[side] = started(log_name(name, side), platform, of, options, **more)
            engines[side].turn(1, 2)  # vLLM looks for some kernels when it needs them
        except RuntimeError as error:
            refused[side] = f"{error}: {last_error(common.LOGS / f'{log_name(name, side)}.log')}"
            if side in engines:
                engines.pop(side).close()
    return refused


def turns_of(engines: dict[str, Engine], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    take(engines, 1, lambda engine: engine.turn(batch, WARM_UP))
    return {
        "turns": take(engines, options.turns, lambda engine: engine.turn(batch, options.tokens)),
        "texts": {side: engine.texts for side, engine in engines.items()},
        "resident": {side: engine.resident_bytes() for side, engine in engines.items()},
    }


def cell_name(name: str, batch: int) -> str:
    return f"{name}, {batch} at once"


def drafts_name(name: str, side: str, drafter: str) -> str:
    return f"{log_name(name, side)}-{drafter}"


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


def same(texts: Texts, expected: Texts) -> float:
    """Of the expected tokens, those up to the first that differs."""
    pairs = zip(texts, expected, strict=True)
    equal = [next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    return sum(equal) / sum(len(text) for text in texts)


def last_error(log: Path) -> str:
    """The last line of a log that names an exception."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error: " in line]
    return re.sub(r"^.*?(?=\w+Error: )", "", lines[-1], count=1) if lines else "nothing in its log"


def drafted(case: str, what: Side, drafter: str, options: argparse.Namespace) -> float | str:
    """Tokens of a step that verified something, or why there are none."""
    platform, model, more = what
    config = {**DRAFTERS[drafter], "num_speculative_tokens": options.drafts}
    with side_by_side() as engines:
        try:
            engine = started(case, platform, model, options, speculative_config=config, **more)
            engines[drafter] = engine
            engine.turn(max(options.batches), options.tokens)
        except RuntimeError as error:
            return str(error)
        return 1 + engine.counter(ACCEPTED) / engine.counter(DRAFTS)


# ---- showing -------------------------------------------------------------------------------------------


def show(cases: dict[str, Any], options: argparse.Namespace) -> None:
    lines, drafts, refused = [], [], []
    for name in options.formats:
        cells = {batch: cases[cell_name(name, batch)] for batch in options.batches}
        for side in next(iter(cells.values()))["resident"]:
            found = [cases[drafts_name(name, side, drafter)] for drafter in options.drafters]
            drafts.append([name, side, *(one if isinstance(one, str) else f"{one:.2f}" for one in found)])
            for batch, cell in cells.items():
                seconds = [turn[side] for turn in cell["turns"]]
                lines.append(
                    [
                        name,
                        side,
                        str(batch),
                        f"{batch * options.tokens / median(seconds):.1f}",
                        f"{batch * options.tokens / min(seconds):.1f}",
                        *(against(cell["turns"], side, other) for other in (PLAIN, UPSTREAM)),
                        *(
                            f"{same(cell['texts'][side], other):.2f}" if other is not None else ""
                            for other in (cell["dequantised"], cell["texts"].get(UPSTREAM))
                        ),
                        f"{cell['resident'][side] >> 20}",
                    ]
                )
        refused += [f"{name}, {side}: {reason}" for side, reason in cell["refused"].items()]
    to = (f"to {PLAIN}", f"to {UPSTREAM}")
    header = [
        "format",
        "kernels",
        "batch",
        "tokens/s",
        "at best",
        *to,
        "text of it dequantised",
        f"text of {UPSTREAM}",
        "resident MiB",
    ]
    common.log(f"\n{options.dtype}, {options.tokens} tokens a prompt, k = {options.drafts}\n")
    common.log(shared.markdown(header, lines))
    common.log("\nTokens of a step that verified something:\n")
    common.log(shared.markdown(["format", "kernels", *options.drafters], drafts))
    common.log("\n".join(["", *refused, "", common.NOISE_NOTE]))


def against(turns: list[Turn], side: str, other: str) -> str:
    return interval(ratio(turns, side, other)) if side != other and other in turns[0] else ""


def main() -> int:
    options = parse_options()
    common.warn_if_busy()

    def whole() -> None:
        model = options.model or demo_model_path()
        settings = {name: getattr(options, name) for name in ("tokens", "turns", "texts", "dtype", "drafts")}
        settings |= {"model": model, "largest batch": max(options.batches), "machine": common.describe_machine()}
        kept = shared.Kept.open(options.json, settings, options.fresh)
        for name in options.formats:
            measure(name, model, options, kept)
        show(kept.cases, options)

    return shared.run_whole(whole)


if __name__ == "__main__":
    sys.exit(main())
