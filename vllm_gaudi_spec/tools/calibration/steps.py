"""The steps of a calibration, which the scripts in calibration/ call. Each reads files and writes files.

A step reads and checks all its inputs before it writes anything, and reports a bad input in one line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_gaudi_spec.config import GAUDI2, in_one_line
from vllm_gaudi_spec.devices import describe_device, load_backend
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import Node, QuantFilesError, Record
from vllm_gaudi_spec.quantization.fingerprint import fingerprint
from vllm_gaudi_spec.tools.calibration.folder import Folder, read_json, serving_config, write_json
from vllm_gaudi_spec.tools.calibration.scales import CARDS, SCALE_METHODS, expand, make_scales, unify
from vllm_gaudi_spec.tools.io.prompts import load_prompts


def exit_status(name: str, step: Callable[[], None], *, verbose: bool = False) -> int:
    """Run a step, and return 0 on success, 1 with one line on stderr on failure, and 130 if interrupted."""
    try:
        step()
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run it again to go on", file=sys.stderr)
        return 130
    except Exception as error:
        if verbose:
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"{name}: error: {kind}{in_one_line(error)}", file=sys.stderr, flush=True)
        return 1
    return 0


def detect_device(folder: Folder, card: str | None = None) -> None:
    """Note the card that the scales are for: the named one, else the one of this machine."""
    device = describe_device()
    card = card or load_backend().weights.fp8_range or GAUDI2
    write_json(folder.device, device | {"card": card})
    print(f"{device['device']} ({device['mode']}); scales for {card}")


def prepare_prompts(folder: Folder, source: str | None, limit: int | None, chat_model: str | None = None) -> None:
    """Write the prompts to measure with. With `chat_model` each is put into that model's chat template."""
    prompts = load_prompts(source, limit)
    if chat_model:
        from vllm.tokenizers import get_tokenizer

        tokenizer = get_tokenizer(chat_model)
        turns = ([{"role": "user", "content": text}] for text in prompts)
        prompts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in prompts)
    files.replace(folder.prompts, lines.encode())
    print(f"{len(prompts)} prompts in {folder.prompts}")


def postprocess_measurements(folder: Folder, models: dict[str, str], *, allow_unseen: bool = False) -> None:
    made = {}
    for name in folder.roles:
        records = _measured(folder.role(name).measured, None, models.get(name))
        made[name] = [postprocess(record, allow_unseen=allow_unseen) for record in records]
    for name, done in made.items():
        for record, _ in done:
            files.write(folder.role(name).processed, record)
        record, notes = done[0]
        print(f"{name}: {len(record.nodes)} modules; {len(notes.shared)} matmuls have the range of their cache")
        for unseen in notes.unseen:
            print(f"{name}: warning: {unseen} saw no value and stays in high precision", file=sys.stderr)


# The cache that a matmul's second input is read from. The matmul has to use the scale of that cache; INC also measures
# padding in the input, which nobody has written.
_READ_FROM = {"matmul_qk": "k_cache", "matmul_av": "v_cache"}


@dataclass
class Notes:
    """The changes that `postprocess` made to a record."""

    shared: list[str] = field(default_factory=list)
    """Matmuls that take the range of their cache."""
    unseen: list[str] = field(default_factory=list)
    """Modules that saw no value, which stay in high precision."""


def postprocess(record: Record, *, allow_unseen: bool = False) -> tuple[Record, Notes]:
    """Drop modules that saw no value, and give matmuls of attention the range of the cache that they read."""
    notes = Notes()
    names = record.looked_at
    nodes = {name: record.nodes[name] for name in names if name in record.nodes and _has_seen(record.nodes[name])}
    notes.unseen = [name for name in names if name not in nodes]
    if not nodes or (notes.unseen and not allow_unseen):
        raise QuantFilesError(
            f"{len(notes.unseen)} of {len(names)} modules saw no value, {' and '.join(notes.unseen[:2])} among them: "
            "measure with more prompts, or leave them in high precision with --allow-unseen"
        )
    for name, node in nodes.items():
        parent, _, kind = name.rpartition(".")
        cache = nodes.get(f"{parent}.{_READ_FROM.get(kind)}")
        if cache is not None:
            nodes[name] = replace(node, inputs=[node.inputs[0], cache.inputs[0]])
            notes.shared.append(name)
    return replace(record, nodes=nodes), notes


def _has_seen(node: Node) -> bool:
    return any(values.max() > 0 for values in [*node.inputs, *node.outputs])


def unify_ranks(
    prefixes: Sequence[tuple[Path, Path]], world: int | None, measured_world: int | None, model: str | None
) -> None:
    """Combine the ranks of each (source, destination) prefix, and split them for the ranks that will serve.

    Args:
        prefixes: where measurements are read, and where they are written.
        world: number of ranks that will serve; None for as many as measured.
        measured_world: which measurements to read, where there are several numbers of ranks.
        model: the model that the first source has to be of.
    """
    ranks = [_measured(source, measured_world, None if i else model) for i, (source, _) in enumerate(prefixes)]
    made = [expand(unify(records), world or len(records)) for records in ranks]
    for (source, destination), old, new in zip(prefixes, ranks, made, strict=True):
        for record in new:
            files.write(destination, record)
        print(f"{source}: {len(old)} ranks measured, files for {len(new)}")


def make_scale_files(
    folder: Folder, models: dict[str, str], methods: Sequence[str], card: str | None, exclude: Sequence[str]
) -> None:
    """Write scales for every measured number of ranks, and a QUANT_CONFIG for each method."""
    roles = folder.roles
    card = card or str(read_json(folder.device).get("card"))
    if card not in CARDS:
        raise QuantFilesError(f"{folder.device} names no card: {card}; run step 1 again, or give --card")
    made = {}
    for name in roles:
        prefix = folder.role(name).final
        worlds = [_measured(prefix, world, models.get(name)) for world in sorted(files.find_ranks(prefix)) or [1]]
        included = [[_without(record, exclude) for record in ranks] for ranks in worlds]
        chosen = methods or [method for method in SCALE_METHODS if _can_be_made(method, included[0][0])]
        scales = {
            method: [made for ranks in included for made in make_scales(ranks, method, card)] for method in chosen
        }
        made[name] = scales, [each for each in worlds[0][0].looked_at if each not in worlds[0][0].nodes]
    for name, (scales, unseen) in made.items():
        role = folder.role(name)
        for method, records in scales.items():
            for record in records:
                files.write(role.final, record, method)
            write_json(role.quant_config(method), serving_config(role.final, method, exclude, unseen))
            print(
                f"{name}: {len(records[0].nodes)} modules, {card}, {method}: QUANT_CONFIG={role.quant_config(method)}"
            )
        for method in [] if methods else [method for method in SCALE_METHODS if method not in scales]:
            print(f"{name}: weights were measured per tensor, so there is no {method}")


def _measured(prefix: Path, world: int | None, model: str | None) -> list[Record]:
    records = files.read_world(prefix, world)
    expected = fingerprint(model) if model else ""
    if expected and records[0].model and records[0].model != expected:
        raise QuantFilesError(f"{prefix} was measured on another model than {model}")
    return records


def _without(record: Record, exclude: Sequence[str]) -> Record:
    nodes = {k: v for k, v in record.nodes.items() if not any(re.search(pattern, k) for pattern in exclude)}
    return replace(record, nodes=nodes)


def _can_be_made(method: str, record: Record) -> bool:
    def has_channels(name: str, node: Node) -> bool:
        return "weight" not in node.params or (name in record.linears and node.params["weight"].size > 1)

    return not SCALE_METHODS[method].weight_per_channel or all(has_channels(*item) for item in record.nodes.items())
