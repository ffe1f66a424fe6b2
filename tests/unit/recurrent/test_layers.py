"""vLLM's layers with our recurrences against transformers, which has its own."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import JambaConfig, KimiLinearConfig, Lfm2Config, NemotronHConfig, OlmoHybridConfig, Qwen3NextConfig
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.recurrent.layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba1,
    Mamba2,
    OlmoDeltaNet,
    ShortConvolution,
)
from vllm_gaudi_spec.recurrent.states import RecurrentStates
from vllm_gaudi_spec.recurrent.table import SERVED
from vllm_gaudi_spec.tools.doctor.layers import count_gates, num_layers_with_kv

HIDDEN, NAME = 32, "model.layers.0.mixer"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    made = VllmConfig(device_config=DeviceConfig("cpu"), cache_config=CacheConfig(mamba_cache_dtype="float32"))
    made.model_config = SimpleNamespace(dtype=torch.float32, is_moe=False, hf_text_config=None)
    with set_current_vllm_config(made):
        store = tmp_path_factory.mktemp("group") / "store"
        init_distributed_environment(1, 0, f"file://{store}", local_rank=0, backend="gloo")
        initialize_model_parallel()
        yield made
    cleanup_dist_env_and_memory()


# Sizes of the layers of Qwen3-Next and OLMo Hybrid
DELTA_NET = dict(hidden_size=HIDDEN, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=6)


def gated_delta_net(config: VllmConfig) -> tuple[nn.Module, Any]:
    sizes = config.model_config.hf_text_config = Qwen3NextConfig(
        **DELTA_NET, linear_num_value_heads=4, linear_conv_kernel_dim=4
    )
    ours = QwenGatedDeltaNetAttention(sizes, config, prefix=NAME, gqa_interleaved_layout=True)
    return Qwen3NextGatedDeltaNet(sizes, layer_idx=0), ours


def olmo_delta_net(config: VllmConfig) -> tuple[nn.Module, Any]:
    sizes = OlmoHybridConfig(
        **DELTA_NET, linear_num_value_heads=2, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True
    )
    config.model_config.hf_text_config = sizes
    upstream.apply_to_models(["OlmoHybridForCausalLM"])
    return OlmoHybridGatedDeltaNet(sizes, layer_idx=0), OlmoHybridGatedDeltaNetAttention(sizes, config, prefix=NAME)


def kimi_delta_attention(config: VllmConfig) -> tuple[nn.Module, Any]:
    theirs = KimiLinearConfig(hidden_size=HIDDEN, linear_num_heads=3, linear_head_dim=8, linear_conv_kernel_dim=4)
    sizes = SimpleNamespace(
        hidden_size=HIDDEN,
        hidden_act="silu",
        rms_norm_eps=theirs.rms_norm_eps,
        linear_attn_config=dict(head_dim=8, num_heads=3, short_conv_kernel_size=4),
    )
    return KimiLinearDeltaAttention(theirs, layer_idx=0), KimiGatedDeltaNetAttention(sizes, config, prefix=NAME)


def mixer(config: VllmConfig) -> dict[str, Any]:
    """Return the arguments that vLLM's layers of Mamba share."""
    sizes = dict(hidden_size=HIDDEN, ssm_state_size=6, conv_kernel_size=4, use_conv_bias=True, use_bias=False)
    return sizes | dict(model_config=config.model_config, cache_config=config.cache_config, prefix=NAME)


def mamba_2(config: VllmConfig) -> tuple[nn.Module, Any]:
    sizes = dict(mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=6, n_groups=2, chunk_size=16)
    theirs = NemotronHMamba2Mixer(NemotronHConfig(hidden_size=HIDDEN, **sizes), layer_idx=0)
    ours = MambaMixer2(intermediate_size=64, n_groups=2, num_heads=8, head_dim=8, **mixer(config))
    return theirs, ours


def mamba_1(config: VllmConfig) -> tuple[nn.Module, Any]:
    sizes = JambaConfig(hidden_size=HIDDEN, mamba_d_state=6, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=5)
    norm = dict(use_rms_norm=True, rms_norm_eps=sizes.rms_norm_eps)
    ours = MambaMixer(intermediate_size=2 * HIDDEN, time_step_rank=5, **norm, **mixer(config))
    return JambaMambaMixer(sizes, layer_idx=0), ours


def short_convolution(config: VllmConfig) -> tuple[nn.Module, Any]:
    sizes = Lfm2Config(hidden_size=HIDDEN, conv_L_cache=3, conv_bias=True)
    ours = ShortConv(sizes, HIDDEN, 0, config.model_config, config.cache_config, prefix=NAME)
    return Lfm2ShortConv(sizes, layer_idx=0), ours


Make = Callable[[VllmConfig], tuple[nn.Module, Any]]
KINDS: list[tuple[type, Make, str]] = [
    (GatedDeltaNet, gated_delta_net, "Qwen3NextForCausalLM"),
    (KimiDeltaAttention, kimi_delta_attention, "KimiLinearForCausalLM"),
    (Mamba1, mamba_1, "JambaForCausalLM"),
    (Mamba2, mamba_2, "NemotronHForCausalLM"),
    (OlmoDeltaNet, olmo_delta_net, "OlmoHybridForCausalLM"),
    (ShortConvolution, short_convolution, "Lfm2ForCausalLM"),
]
# Names in transformers that vLLM's models rename when they load a checkpoint, with the part that each becomes.
RENAMED: dict[type, dict[str, tuple[str, int | None]]] = {
    KimiDeltaAttention: {
        "q_proj.weight": ("in_proj_qkvgfab.weight", 0),
        "k_proj.weight": ("in_proj_qkvgfab.weight", 1),
        "v_proj.weight": ("in_proj_qkvgfab.weight", 2),
        "b_proj.weight": ("in_proj_qkvgfab.weight", 3),
        "forget_gate.f_a_proj.weight": ("in_proj_qkvgfab.weight", 4),
        "forget_gate.f_b_proj.weight": ("f_b_proj.weight", None),
        "forget_gate.dt_bias": ("dt_bias", None),
        "forget_gate.A_log": ("A_log", None),
    },
    OlmoDeltaNet: {
        "q_proj.weight": ("in_proj_qkvg.weight", 0),
        "k_proj.weight": ("in_proj_qkvg.weight", 1),
        "v_proj.weight": ("in_proj_qkvg.weight", 2),
        "g_proj.weight": ("in_proj_qkvg.weight", 3),
    },
    Mamba1: {"A_log": ("A", None)},
    Mamba2: {"A_log": ("A", None)},
}


def load(ours: nn.Module, theirs: nn.Module) -> None:
    parameters, renamed = dict(ours.named_parameters()), RENAMED.get(type(ours), {})
    for name, weight in theirs.named_parameters():
        weight.copy_(torch.randn_like(weight) * (weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5))
        own_name, shard = renamed.get(name, (name, None))
        own = parameters[own_name]
        loader = getattr(own, "weight_loader", lambda own, loaded: own.copy_(loaded.view_as(own)))
        if isinstance(ours, KimiDeltaAttention | OlmoDeltaNet) and name == "conv1d.weight":
            # Queries, keys and values as in checkpoints.
            sizes = [len(getattr(theirs, part).weight) for part in ("q_proj", "k_proj", "v_proj")]
            for part, taps in enumerate(weight.split(sizes)):
                loader(own, taps, part)
        elif shard is not None:
            loader(own, weight, shard)
        else:
            loader(own, weight)
    for module in ours.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


@pytest.mark.parametrize(("kind", "make", "architecture"), KINDS)
@pytest.mark.parametrize("num_drafts", [0, 2])
@torch.no_grad()
def test_prompts_and_verify_steps_equal_transformers(
    kind: type, make: Make, architecture: str, num_drafts: int, config: VllmConfig
) -> None:
    torch.manual_seed(0)
    config.compilation_config.static_forward_context.clear()
    theirs, ours = make(config)
    assert type(ours) is kind, "registered out of tree"
    load(ours, theirs)
    shape = ours.layer_shape()
    num_gates = count_gates(SERVED[architecture], shape.state)
    assert shape.num_gates == num_gates, "memory is planned before it is built"
    num_pending = num_drafts + 1 if num_drafts else 0
    states = RecurrentStates([(NAME, shape)], num_rows=3, num_pending=num_pending, device=torch.device("cpu"))
    ours.state = states.by_layer[NAME]
    text = torch.randn(60, HIDDEN)
    expected = theirs(text[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]

    def read(begin: int, end: int, wrong: int = 0, *, is_prompt: bool) -> torch.Tensor:
        """Read tokens in row 1; row 2 is padding. The last `wrong` tokens are rejected."""
        queries = end - begin + wrong
        hidden = torch.cat((text[begin:end], torch.randn(wrong + queries, HIDDEN)))
        call = states.call(
            torch.tensor([1, 2]),
            torch.tensor([begin, 0], dtype=torch.int32),
            torch.tensor([queries, 0], dtype=torch.int32),
            queries,
            is_prompt=is_prompt,
        )
        with set_forward_context({NAME: call}, config, 2 * queries):
            if kind in (Mamba1, OlmoDeltaNet, ShortConvolution):
                out = torch.empty_like(hidden)
                ours(hidden, out)
            elif kind is KimiDeltaAttention:
                out = ours(hidden, torch.zeros(len(hidden)))
            else:
                out = ours(hidden)
        states.advance(call)
        return out[: end - begin]

    outs = [read(0, 30, is_prompt=True), read(30, 37, is_prompt=True)]
    at = 37
    while at < 57:
        accepted = 1 + at % (num_drafts + 1)
        outs.append(read(at, at + accepted, num_drafts + 1 - accepted, is_prompt=False))
        at += accepted
    torch.testing.assert_close(torch.cat(outs), expected[:at], atol=1e-4, rtol=1e-4)


def test_layers_of_kimi_linear_are_counted_from_one() -> None:
    """Its configuration has no types of layers."""
    text = SimpleNamespace(num_hidden_layers=4, linear_attn_config=dict(kda_layers=[1, 3, 4], full_attn_layers=[2]))
    for (start, end), with_kv in (((0, 4), 1), ((0, 1), 0), ((1, 2), 1), ((2, 4), 0)):
        model: Any = SimpleNamespace(
            is_attention_free=False,
            is_hybrid=True,
            hf_text_config=text,
            get_layers_start_end_indices=lambda parallel, of=(start, end): of,
        )
        assert num_layers_with_kv(model, None) == with_kv
