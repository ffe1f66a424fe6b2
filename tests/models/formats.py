"""Checkpoints with weights in formats of their own: every projection of a tiny model rounded, in published layouts.

The reference is transformers on what the rounded weights stand for, as our reference kernels compute; beside native
kernels of a format that rounds activations too, it does the same.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.architectures import PARTS, TEXT, Recipe, shape
from tests.models.comparison import ROUGH
from vllm_gaudi_spec.config import ADDITIONAL_CONFIG_KEY, E4M3_MAX, GAUDI2, NATIVE, REFERENCE

E4M3 = torch.finfo(torch.float8_e4m3fn).max
GROUP = 128
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Scales of inputs and of KV where a checkpoint has fixed ones: norms leave values of a few units.
INPUT_MAX, KV_SCALE = 8.0, 0.02

Tensors = dict[str, torch.Tensor]
Rounded = tuple[Tensors, torch.Tensor]
"""Tensors by the suffix that takes the place of `weight`, and the weight that they stand for."""
Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    weights: Callable[[torch.Tensor], Rounded] | None
    """How a projection [out, in] is rounded; None leaves all as they are."""
    config: dict[str, Any]
    """`quantization_config` of config.json."""
    stacks: Callable[[torch.Tensor], Rounded] | None = None
    """How experts in one tensor [experts, in, out] are rounded; the tensors' names follow after an underscore."""
    activations: Rounding | None = None
    kv: tuple[str, ...] = ()
    """Names under a layer's self_attn for scales of keys and values."""


# ---- rounding --------------------------------------------------------------------------------------------


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)


def fp8_channel(weight: torch.Tensor) -> Rounded:
    scale = weight.abs().amax(1, keepdim=True) / E4M3
    rounded = _fp8(weight, scale)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def fp8_tensor(weight: torch.Tensor, shape: tuple[int, ...] = (1,), fixed_inputs: bool = False) -> Rounded:
    scale = weight.abs().max() / E4M3
    rounded = _fp8(weight, scale)
    found = {"weight": rounded, "weight_scale": scale.reshape(shape)}
    if fixed_inputs:
        found["input_scale"] = torch.full(shape, INPUT_MAX / E4M3)
    return found, rounded.float() * scale


def fp8_blocks(weight: torch.Tensor, name: str) -> Rounded:
    """The last block of a side may be a part of one."""
    height, width = weight.shape
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    whole = nn.functional.pad(weight, (0, columns * GROUP - width, 0, rows * GROUP - height))
    blocks = whole.reshape(rows, GROUP, columns, GROUP)
    scale = blocks.abs().amax((1, 3), keepdim=True) / E4M3
    rounded = _fp8(blocks, scale)
    meant = (rounded.float() * scale).reshape(whole.shape)[:height, :width]
    return {"weight": rounded.reshape(whole.shape)[:height, :width], name: scale.reshape(rows, columns)}, meant


def int8_channel(weight: torch.Tensor, fixed_inputs: bool = False) -> Rounded:
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    found = {"weight": rounded, "weight_scale": scale}
    if fixed_inputs:
        found["input_scale"] = torch.full((1,), INPUT_MAX / 127)
    return found, rounded.float() * scale


def _grouped(weight: torch.Tensor, bits: int, zero_points: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned values [out, in], scales and zero points [out, in / GROUP]."""
    groups = weight.unflatten(1, (-1, GROUP))
    highest = 2**bits - 1
    if zero_points:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = (high - low) / highest
        zero = (-low / scale).round().clamp(0, highest)
    else:
        scale = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    # GPTQ and AWQ keep them in float16, and a Gaudi takes them in bfloat16.
    scale = scale.bfloat16().half().float()
    values = (groups / scale[..., None] + zero[..., None]).round().clamp(0, highest)
    return values.flatten(1).int(), scale, zero.int()


def _meant(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((values.unflatten(1, (-1, GROUP)) - zero[..., None]) * scale[..., None]).flatten(1)


def packed(weight: torch.Tensor, bits: int, zero_points: bool = False) -> Rounded:
    """compressed-tensors: along the inputs."""
    values, scale, zero = _grouped(weight, bits, zero_points)
    half = 2 ** (bits - 1)
    found = {
        "weight_packed": pack_to_int32((values - half).to(torch.int8), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if zero_points:
        found["weight_zero_point"] = pack_to_int32((zero - half).to(torch.int8), bits, packed_dim=0)
    return found, _meant(values, scale, zero)


def _packed_columns(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[R, C] -> int32 [R, C * bits / 32], the first of a word in its lowest bits."""
    in_word = 32 // bits
    words = values.long().unflatten(1, (-1, in_word))
    if order is not None:
        words = words[..., list(order)]
    word = (words << (bits * torch.arange(in_word))).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def awq(weight: torch.Tensor) -> Rounded:
    values, scale, zero = _grouped(weight, 4, zero_points=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    found = {
        "qweight": _packed_columns(values.T, 4, order),
        "qzeros": _packed_columns(zero.T, 4, order),
        "scales": scale.T.contiguous().half(),
    }
    return found, _meant(values, scale, zero)


def gptq(weight: torch.Tensor, bits: int = 4, reordered: bool = False) -> Rounded:
    """`reordered`: inputs share scales in an order of their own (act-order)."""
    num_inputs = weight.shape[1]
    order = torch.arange(num_inputs)
    if reordered:
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    values, scale, zero = _grouped(weight[:, order], bits, zero_points=False)
    back = order.argsort()
    found = {
        "qweight": _packed_columns(values[:, back], bits).T.contiguous(),
        "qzeros": _packed_columns(zero.T - 1, bits),
        "scales": scale.T.contiguous().half(),
        "g_idx": (torch.arange(num_inputs, dtype=torch.int32) // GROUP)[back],
    }
    return found, _meant(values, scale, zero)[:, back]


def _fp4_codes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two to a byte, and what they stand for."""
    nearest = (values.abs()[..., None] - FP4).abs().argmin(-1)
    codes = nearest + 8 * (values < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + 16 * high).to(torch.uint8), FP4[nearest] * values.sign()


def nvfp4(weight: torch.Tensor, names: tuple[str, str, str], inverse: bool) -> Rounded:
    """Names of the codes, their scales and the scale of all, which some write as what to divide by."""
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().max() / (E4M3 * 6)
    scale = (groups.abs().amax(2, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn)
    full = scale.float() * whole
    codes, values = _fp4_codes(groups / full)
    of_all = (1 / whole if inverse else whole).reshape((1,) if inverse else ())
    found = {names[0]: codes.flatten(1), names[1]: scale.squeeze(2), names[2]: of_all}
    if not inverse:
        found["input_scale"] = torch.tensor(INPUT_MAX / (E4M3 * 6))
    return found, (values * full).flatten(1)


def mxfp4(weight: torch.Tensor) -> Rounded:
    groups = weight.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(2, keepdim=True) / 6).log2().ceil()
    codes, values = _fp4_codes(groups / 2**exponent)
    scale = (exponent + 127).to(torch.uint8).squeeze(2)
    return {"weight_packed": codes.flatten(1), "weight_scale": scale}, (values * 2**exponent).flatten(1)


def mxfp4_stack(weight_EKN: torch.Tensor) -> Rounded:
    """gpt-oss: each output's inputs side by side, in blocks of 32."""
    rows = weight_EKN.transpose(1, 2).contiguous()
    found, meant = mxfp4(rows.flatten(0, 1))
    blocks = (*rows.shape[:2], rows.shape[2] // 32)
    stored = {"blocks": found["weight_packed"].view(*blocks, 16), "scales": found["weight_scale"].view(blocks)}
    return stored, meant.view(rows.shape).transpose(1, 2).contiguous()


def _inputs(values: torch.Tensor, highest: float, fixed: bool, dtype: torch.dtype | None) -> torch.Tensor:
    """Activations rounded as a kernel does, with a scale for each token or the one of the checkpoint."""
    scale = INPUT_MAX / highest if fixed else values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / highest
    scaled = (values / scale).clamp(-highest - (dtype is None), highest)
    return (scaled.round() if dtype is None else scaled.to(dtype).float()) * scale


FP8_TOKENS = partial(_inputs, highest=E4M3, fixed=False, dtype=torch.float8_e4m3fn)
FP8_TOKENS_GAUDI2 = partial(FP8_TOKENS, highest=E4M3_MAX[GAUDI2])
FP8_FIXED = partial(_inputs, highest=E4M3, fixed=True, dtype=torch.float8_e4m3fn)
INT8_TOKENS = partial(_inputs, highest=127, fixed=False, dtype=None)
INT8_FIXED = partial(_inputs, highest=127, fixed=True, dtype=None)


# ---- the formats -----------------------------------------------------------------------------------------


def numbers(bits: int, kind: str, strategy: str, dynamic: Any = False, **more: Any) -> dict[str, Any]:
    """How compressed-tensors describes rounded numbers."""
    return dict(num_bits=bits, type=kind, symmetric=True, strategy=strategy, dynamic=dynamic) | more


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, kv: bool = False) -> dict:
    return dict(
        quant_method="compressed-tensors",
        format=layout,
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=inputs)),
        ignore=["lm_head", "re:.*gate$"],
        quantization_status="compressed",
        kv_cache_scheme=numbers(8, "float", "tensor") if kv else None,
    )


SELF_SCALES, PROJECTION_SCALES = ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")
CT_FP8 = numbers(8, "float", "channel"), numbers(8, "float", "token", True)
CT_INT8 = numbers(8, "int", "channel"), numbers(8, "int", "token", True)
CT_W4 = numbers(4, "int", "group", group_size=GROUP)
AWQ = dict(
    quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm", modules_to_not_convert=["gate"]
)
GPTQ = dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True, lm_head=False)
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
MODELOPT = dict(quant_method="modelopt", producer=dict(name="modelopt", version="0.33.0"))


def modelopt(algorithm: str, kv: str | None = None, **more: Any) -> dict[str, Any]:
    flat = dict(quant_algo=algorithm, kv_cache_quant_algo=kv, exclude_modules=["lm_head", "*gate"], **more)
    return MODELOPT | flat | dict(quantization=flat)


FORMATS: dict[str, Format] = {
    "ct-fp8-dynamic": Format(fp8_channel, compressed("float-quantized", *CT_FP8), activations=FP8_TOKENS),
    "ct-fp8-static": Format(
        partial(fp8_tensor, fixed_inputs=True),
        compressed("float-quantized", numbers(8, "float", "tensor"), numbers(8, "float", "tensor")),
        activations=FP8_FIXED,
    ),
    "ct-fp8-block": Format(
        partial(fp8_blocks, name="weight_scale"),
        compressed(
            "float-quantized",
            numbers(8, "float", "block", block_structure=[GROUP, GROUP]),
            numbers(8, "float", "group", True, group_size=GROUP),
        ),
    ),
    "ct-fp8-kv": Format(
        fp8_channel, compressed("float-quantized", *CT_FP8, kv=True), activations=FP8_TOKENS, kv=SELF_SCALES
    ),
    "ct-int8": Format(int8_channel, compressed("int-quantized", *CT_INT8), activations=INT8_TOKENS),
    "ct-int8-static": Format(
        partial(int8_channel, fixed_inputs=True),
        compressed("int-quantized", CT_INT8[0], numbers(8, "int", "tensor")),
        activations=INT8_FIXED,
    ),
    "ct-int8-kv": Format(
        int8_channel, compressed("int-quantized", *CT_INT8, kv=True), activations=INT8_TOKENS, kv=SELF_SCALES
    ),
    "ct-w4a16": Format(partial(packed, bits=4), compressed("pack-quantized", CT_W4)),
    "ct-w4a16-asym": Format(
        partial(packed, bits=4, zero_points=True), compressed("pack-quantized", CT_W4 | dict(symmetric=False))
    ),
    "ct-w4a16-kv": Format(partial(packed, bits=4), compressed("pack-quantized", CT_W4, kv=True), kv=SELF_SCALES),
    "ct-w8a16": Format(partial(packed, bits=8), compressed("pack-quantized", CT_W4 | dict(num_bits=8))),
    "ct-kv-only": Format(None, compressed("dense", CT_W4, kv=True) | dict(config_groups={}), kv=SELF_SCALES),
    "ct-nvfp4a16": Format(
        partial(nvfp4, names=("weight_packed", "weight_scale", "weight_global_scale"), inverse=True),
        compressed("nvfp4-pack-quantized", numbers(4, "float", "tensor_group", group_size=16)),
    ),
    "ct-mxfp4a16": Format(
        mxfp4,
        compressed("mxfp4-pack-quantized", numbers(4, "float", "group", group_size=32, scale_dtype="torch.uint8")),
    ),
    "awq": Format(awq, AWQ),
    "gptq": Format(gptq, GPTQ),
    "gptq-int8": Format(partial(gptq, bits=8), GPTQ | dict(bits=8)),
    "gptq-desc-act": Format(partial(gptq, reordered=True), GPTQ | dict(desc_act=True)),
    "auto-round": Format(
        gptq, GPTQ | dict(quant_method="auto-round", packing_format="auto_round:auto_gptq", autoround_version="0.9.0")
    ),
    "fp8-block": Format(partial(fp8_blocks, name="weight_scale_inv"), FP8 | dict(weight_block_size=[GROUP, GROUP])),
    "fp8-tensor-dynamic": Format(partial(fp8_tensor, shape=()), FP8),
    "fp8-tensor-static": Format(
        partial(fp8_tensor, shape=(), fixed_inputs=True), FP8 | dict(activation_scheme="static")
    ),
    "modelopt-fp8": Format(partial(fp8_tensor, shape=(), fixed_inputs=True), modelopt("FP8"), activations=FP8_FIXED),
    "modelopt-fp8-kv": Format(
        partial(fp8_tensor, shape=(), fixed_inputs=True),
        modelopt("FP8", kv="FP8"),
        activations=FP8_FIXED,
        kv=PROJECTION_SCALES,
    ),
    "modelopt-nvfp4": Format(
        partial(nvfp4, names=("weight", "weight_scale", "weight_scale_2"), inverse=False),
        modelopt("NVFP4", group_size=16),
    ),
    "gpt-oss-mxfp4": Format(
        None,
        dict(
            quant_method="mxfp4",
            modules_to_not_convert=[
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
            ],
        ),
        stacks=mxfp4_stack,
    ),
    "bitsandbytes": Format(None, dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}

# ---- writing ---------------------------------------------------------------------------------------------


def rewrite(folder: Path, name: str, plain: Path) -> None:
    """Put a checkpoint's projections into the format; beside it, in `plain`, weights for what they stand for."""
    chosen = FORMATS[name]
    found: Tensors = {}
    meant: Tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if chosen.stacks is not None and key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors, meant[key] = chosen.stacks(tensor.float())
            found |= {f"{key}_{suffix}": value.contiguous() for suffix, value in tensors.items()}
            continue
        base = key.removesuffix("weight")
        if chosen.weights is None or not base.endswith(("_proj.", "_proj_with_mqa.")) or base.endswith(".eh_proj."):
            found[key] = meant[key] = tensor
            continue
        tensors, meant[key] = chosen.weights(tensor.float())
        found |= {base + suffix: value.contiguous() for suffix, value in tensors.items()}
    attentions = {key[: key.index("self_attn.") + len("self_attn.")] for key in meant if "self_attn." in key}
    found |= {prefix + suffix: torch.tensor(KV_SCALE) for prefix in attentions for suffix in chosen.kv}
    described = json.loads((folder / "config.json").read_text())
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(described))
    meant = {key: tensor.contiguous() for key, tensor in meant.items()}
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": chosen.config}, indent=1))
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def rounded_activations(model: nn.Module, rounding: Rounding) -> Iterator[None]:
    """Within the context a model of what the weights stand for rounds its activations as native kernels do. Latent
    attention has absorbed `kv_b_proj`, whose input nothing rounds."""
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear) and key.endswith(("_proj", "_proj_with_mqa")) and "kv_b" not in key
    ]
    yield
    for hook in hooks:
        hook.remove()


# ---- the table -------------------------------------------------------------------------------------------

LLAMA = Recipe(
    architecture="LlamaForCausalLM",
    config=shape(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4),
)
QWEN3 = replace(LLAMA, architecture="Qwen3ForCausalLM", config=LLAMA.config | dict(tie_word_embeddings=True))
EXPERTS, LATENT, ROUTED = (PARTS[name] for name in ("experts", "latent", "routed"))
WITH_EXPERTS = replace(
    LLAMA, architecture="Qwen3MoeForCausalLM", config=LLAMA.config | EXPERTS | dict(moe_intermediate_size=256)
)
LATENT_256 = LATENT | dict(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
DEEPSEEK = Recipe(
    architecture="DeepseekV3ForCausalLM",
    config=shape(hidden_size=256, intermediate_size=512, **LATENT_256, **ROUTED | dict(moe_intermediate_size=128)),
    published=dict(topk_method="noaux_tc", scoring_func="sigmoid"),
)
HALF = dict(dtype="bfloat16")


def kernels(which: str) -> dict[str, Any]:
    return dict(additional_config={ADDITIONAL_CONFIG_KEY: dict(weight_kernels=which)})


def in_format(name: str, base: Recipe = LLAMA, **changes: Any) -> Recipe:
    # KV in FP8 rounds, and the reference does not.
    tolerance = ROUGH if FORMATS[name].kv else base.tolerance
    return replace(base, format=name, engine=kernels(REFERENCE), tolerance=tolerance, **changes)


# Formats of one architecture's own.
BASES = {"gpt-oss-mxfp4": TEXT["gpt-oss"]}
FORMAT_CASES: dict[str, Recipe] = {name: in_format(name, BASES.get(name, LLAMA)) for name in FORMATS}
FORMAT_CASES |= {
    f"{prefix}-{name}": in_format(name, base)
    for prefix, base, names in (
        ("qwen3", QWEN3, ("ct-fp8-kv", "awq", "gptq")),
        ("moe", WITH_EXPERTS, ("ct-int8", "ct-fp8-dynamic", "ct-w4a16", "fp8-block", "gptq", "awq")),
        ("mla", DEEPSEEK, ("fp8-block", "ct-w4a16", "ct-int8", "ct-fp8-dynamic", "awq")),
    )
    for name in names
}
FORMAT_CASES |= {
    f"{name}@native": replace(FORMAT_CASES[name], engine=kernels(NATIVE), tolerance=ROUGH)
    for name in FORMAT_CASES
    if (of := FORMAT_CASES[name].format) is not None and FORMATS[of].activations is not None
}
FORMAT_CASES |= {
    f"{name}@bf16": replace(FORMAT_CASES[name], engine=FORMAT_CASES[name].engine | HALF, tolerance=ROUGH)
    for name in (
        *("awq", "gptq", "auto-round", "fp8-block", "fp8-tensor-static", "fp8-tensor-dynamic"),
        *("modelopt-fp8", "modelopt-fp8-kv", "modelopt-nvfp4"),
        *("moe-gptq", "moe-awq", "moe-fp8-block", "mla-fp8-block", "mla-awq"),
    )
}
# Rounded while they are loaded, and a rounded KV cache.
FORMAT_CASES |= {
    f"{prefix}@{label}": replace(base, engine=arguments, tolerance=ROUGH)
    for prefix, base in (("fmt-llama", LLAMA), ("fmt-moe", WITH_EXPERTS))
    for label, arguments in {
        "online-fp8": dict(quantization="fp8"),
        "online-fp8-bf16": dict(quantization="fp8") | HALF,
        "online-int8-bf16": dict(quantization="int8_per_channel_weight_only") | HALF,
        "online-mxfp8-bf16": dict(quantization="mxfp8") | HALF,
        "kvfp8": dict(kv_cache_dtype="fp8"),
        "bnb": dict(quantization="bitsandbytes"),
        "gguf": dict(quantization="gguf"),
    }.items()
}
FORMAT_CASES |= {"fmt-llama": LLAMA, "fmt-moe": WITH_EXPERTS, "fmt-mla": DEEPSEEK}
