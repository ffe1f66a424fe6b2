"""Quantized checkpoint formats, which determine each layer's encoding from `quantization_config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.quantization.encodings import (
    CHANNEL,
    TENSOR,
    Block,
    Encoding,
    awq,
    fp4,
    gptq,
    numbers,
    packed_integers,
    stacked_fp4,
)

FP8, UINT4 = "FP8", "4-bit integers"
"""Kinds of weights with which linear layers can stay quantized."""
Described = Mapping[str, Any]
"""The `quantization_config` in config.json."""


class UnknownFormatError(ValueError):
    """Raised for unsupported formats. The message completes the sentence "the model has quantized weights, which
    ..."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    name: str
    default: Encoding | None
    """The encoding of all layers, or None if only the layers in `by_layer` are quantized."""
    by_layer: tuple[tuple[str, Encoding], ...] = ()
    """Pairs of a pattern for layer names and an encoding. The first matching pattern applies."""
    ignored: tuple[str, ...] = ()
    """Names of unquantized layers or of modules that contain them. An entry that starts with `re:` is a pattern."""
    unused: tuple[str, ...] = ()
    """Name suffixes of tensors that accompany a weight but do not affect its value."""
    before_part: str = "."
    """The separator between the name of a layer and the name suffix of one of its tensors."""
    weight: str = ".weight"
    """The suffix that is appended to a layer's name to name its decoded weight."""
    native: str | None = None
    """How linear layers can stay quantized: FP8 if they multiply e4m3 weights by e4m3 inputs, or UINT4 if they multiply
    grouped 4-bit integers by unrounded inputs. It is None if linear layers cannot stay quantized, or if their names do
    not distinguish them from other layers."""

    def find_encoding(self, layer: str) -> Encoding | None:
        return next((encoding for pattern, encoding in self.by_layer if re.search(pattern, layer)), self.default)

    def may_be_native(self, layer: str) -> bool:
        """Whether a layer can stay quantized. `layer` is its name in the checkpoint or in the model before layers are
        merged."""
        is_linear = ".experts." not in layer and not layer.endswith(_NEVER_NATIVE)
        return is_linear and not any(re.search(_pattern(name), layer) for name in self.ignored)


# Layers that never stay quantized, because latent attention absorbs them or because they are not linear layers in vLLM.
_NEVER_NATIVE = ("kv_b_proj", "lm_head", "embed_tokens")


def read_format(described: Described) -> CheckpointFormat:
    """Return the format that a `quantization_config` describes, or raise UnknownFormatError."""
    method = method_of(described)
    if method not in _READERS:
        raise UnknownFormatError(f"are in {method}, which is not supported")
    try:
        return _READERS[method](described)
    except UnknownFormatError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, re.error) as error:
        reason = f"{type(error).__name__}: {in_one_line(error)}"
        raise UnknownFormatError(f"are described in an unsupported way ({reason})") from error


def method_of(described: Described) -> str:
    """Return the quantization method. A checkpoint from ModelOpt may specify only the tool that produced it."""
    producer = described.get("producer")
    unnamed = "modelopt" if isinstance(producer, dict) and producer.get("name") == "modelopt" else "no known format"
    return str(described.get("quant_method") or unnamed).lower()


# ---- compressed-tensors ----------------------------------------------------------------------------------


def _compressed_tensors(described: Described) -> CheckpointFormat:
    if described.get("transform_config"):
        raise UnknownFormatError("need transforms of activations (transform_config), which are not supported")
    sparsity = described.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise UnknownFormatError(f"are sparse ({sparsity['format']}), which is not supported")
    default, of_default, named = None, None, []
    native: set[str | None] = set()
    for group in (described.get("config_groups") or {}).values():
        if (weights := group.get("weights")) is None:
            continue
        layout = str(group.get("format") or described.get("format"))
        encoding = _read_group(weights, layout)
        for target in group["targets"]:
            if not re.fullmatch(r"[A-Z]\w*", target):
                named.append((_pattern(target), encoding))
                continue
            if default is not None and of_default != (weights, layout):  # `target` is a layer class
                raise UnknownFormatError("have a format for each class of layers, which is not supported")
            default, of_default = encoding, (weights, layout)
            native.add(_native(encoding, weights, group.get("input_activations")))
    return CheckpointFormat(
        name="compressed-tensors",
        default=default,
        by_layer=tuple(named),
        ignored=_names(described.get("ignore")),
        native=native.pop() if len(native) == 1 and not named else None,
    )


def _native(encoding: Encoding, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str | None:
    if encoding.rows is not None and inputs is not None and (inputs["num_bits"], inputs["type"]) == (8, "float"):
        return FP8
    is_uint4 = encoding.grouped is not None and int(weights["num_bits"]) == 4 and inputs is None
    return UINT4 if is_uint4 else None


@cache
def _pattern(name: str) -> str:
    return name.removeprefix("re:") if name.startswith("re:") else rf"(^|\.){re.escape(name)}(\.|$)"


def _names(names: Iterable[str] | None) -> tuple[str, ...]:
    found = tuple(names or ())
    for name in found:
        re.compile(_pattern(name))
    return found


def _read_group(weights: Mapping[str, Any], layout: str) -> Encoding:
    bits, kind = int(weights["num_bits"]), weights["type"]
    is_symmetric = bool(weights.get("symmetric", True))
    reordered = weights.get("actorder") in ("group", "dynamic", True)
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8):
        return packed_integers(bits, _block(weights), zero_point=not is_symmetric, reordered=reordered)
    if (
        layout in ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")
        and bits == 8
        and not reordered
    ):
        return numbers(_block(weights), integers=kind == "int", zero_point=not is_symmetric)
    if layout == "nvfp4-pack-quantized":
        return fp4(16, codes="weight_packed", whole="weight_global_scale", divides=True)
    if layout == "mxfp4-pack-quantized":
        return fp4(32, codes="weight_packed")
    raise UnknownFormatError(f"are {bits}-bit {kind} numbers in the layout {layout}, which is not supported")


def _block(weights: Mapping[str, Any]) -> Block:
    strategy = weights.get("strategy") or ("tensor" if not weights.get("group_size") else "group")
    if strategy == "block":
        structure = weights["block_structure"]
        rows, columns = structure.split("x") if isinstance(structure, str) else structure
        return _size(rows), _size(columns)
    if strategy in ("group", "tensor_group"):
        return 1, _size(weights["group_size"])
    if strategy not in ("tensor", "channel"):
        raise UnknownFormatError(f"have scales by {strategy}, which is not supported")
    return TENSOR if strategy == "tensor" else CHANNEL


def _size(written: Any) -> int:
    """Return the number of values that share a scale, or -1 for all values."""
    if (size := int(written)) < 1 and size != -1:
        raise UnknownFormatError(f"have scales of {size} numbers each, which is not possible")
    return size


# ---- other formats ---------------------------------------------------------------------------------------


def _fp8(described: Described) -> CheckpointFormat:
    block = described.get("weight_block_size")
    whole = numbers(None) if block is None else numbers((_size(block[0]), _size(block[1])), scale="weight_scale_inv")
    ignored = described.get("ignored_layers") or described.get("modules_to_not_convert")
    return CheckpointFormat(name="fp8", default=whole, ignored=_names(ignored), native=FP8)


# Routers of experts are never quantized, but GPTQ tools do not list unquantized layers, and AWQ tools may omit routers.
_ROUTERS = (r"re:(^|\.)(\w+_)?(gate|router)$",)


def _gptq(described: Described) -> CheckpointFormat:
    if described.get("dynamic"):
        raise UnknownFormatError("have different numbers of bits in different layers (dynamic), which is not supported")
    if str(described.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise UnknownFormatError(f"are in GPTQ's layout {described['checkpoint_format']}, which is not supported")
    is_new = described.get("checkpoint_format") == "gptq_v2"
    if not described.get("sym", True) and not is_new:
        # This layout stores zero points minus 1, and tools differ in how they store -1.
        raise UnknownFormatError("have zero points in GPTQ's original layout, which programs write in different ways")
    reordered = bool(described.get("desc_act", False))
    encoding = gptq(size=_group_size(described), reordered=reordered, zero_offset=0 if is_new else 1)
    # If one of these fields is set, some layers may be unquantized or have a different bit width.
    is_uniform = not described.get("modules_in_block_to_quantize") and not described.get("extra_config")
    is_uint4 = encoding.grouped is not None and int(described.get("bits", 4)) == 4 and is_uniform
    return CheckpointFormat(
        name="gptq",
        default=encoding,
        ignored=_ROUTERS,
        unused=("g_idx",),
        native=UINT4 if is_uint4 else None,
    )


def _group_size(described: Described) -> int | None:
    written = described.get("group_size", described.get("q_group_size"))
    return None if written is None else _size(written)


def _awq(described: Described) -> CheckpointFormat:
    if int(described.get("bits", described.get("w_bit", 4))) != 4:
        raise UnknownFormatError("are AWQ with other than 4 bits, which is not supported")
    if str(described.get("version", "gemm")).lower() != "gemm":
        raise UnknownFormatError(f"are in AWQ's layout {described['version']}, which is not supported")
    encoding = awq(_group_size(described))
    return CheckpointFormat(
        name="awq",
        default=encoding,
        ignored=(*_names(described.get("modules_to_not_convert")), *_ROUTERS),
        native=UINT4 if encoding.grouped is not None else None,
    )


def _auto_round(described: Described) -> CheckpointFormat:
    packing = str(described.get("packing_format", "auto_round:auto_gptq"))
    if packing.endswith("gptq"):
        return _gptq(described)
    if packing.endswith("awq"):
        return _awq(described)
    raise UnknownFormatError(f"are in auto-round's layout {packing}, which is not supported")


def _modelopt(described: Described) -> CheckpointFormat:
    inner = described.get("quantization") or described
    algorithm = str(inner.get("quant_algo") or "").upper()
    encodings: dict[str, Encoding | None] = {
        "": None,  # only the KV cache is quantized
        "FP8": numbers(None),
        "FP8_PER_CHANNEL_PER_TOKEN": numbers(None),
        "NVFP4": fp4(16, codes="weight", whole="weight_scale_2"),
        "MXFP8": numbers((1, 32)),
    }
    if algorithm not in encodings:
        raise UnknownFormatError(f"are in ModelOpt's {algorithm}, which is not supported")
    return CheckpointFormat(name="modelopt", default=encodings[algorithm])


def _mxfp4(described: Described) -> CheckpointFormat:
    """Return the gpt-oss format, in which only experts are quantized."""
    experts = (r"\.experts\.(gate_up|down)_proj$", stacked_fp4())
    return CheckpointFormat(name="mxfp4", default=None, by_layer=(experts,), before_part="_", weight="")


_READERS: dict[str, Callable[[Described], CheckpointFormat]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mxfp8": _modelopt,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
}
"""Maps `quant_method`, as completed by vLLM, to the function that reads the format."""
FORMATS = tuple(_READERS)
