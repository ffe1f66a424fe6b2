"""Layers that no graph takes: ours compute what vLLM's do; and vLLM's still do what no graph takes."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.models import gemma3n, qwen3_dflash2
from vllm.model_executor.models.falcon_h1 import FalconH1MLP
from vllm.model_executor.models.minicpm3 import MiniCPM3Attention
from vllm.model_executor.models.siglip import SiglipVisionEmbeddings

from tests.support.operations import Dispatched
from vllm_gaudi_spec.upstream import views

HIDDEN, NUM_INPUTS, NUM_TOKENS = 8, 3, 5


class WritesThroughViews(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = operation._schema
        if schema.is_mutable and isinstance(args[0], torch.Tensor) and args[0]._is_view():
            self.found.append(schema.name)
        return operation(*args, **(kwargs or {}))


def outcome(function: Callable[..., torch.Tensor], *args: Any) -> tuple[torch.Tensor, list[str]]:
    with torch.no_grad(), WritesThroughViews() as mode:
        result = function(*args)
    return result, mode.found


def original(owner: Any, name: str) -> Callable[..., Any]:
    return inspect.unwrap(getattr(owner, name))


def linear(size_in: int, size_out: int) -> torch.nn.Linear:
    return torch.nn.Linear(size_in, size_out, bias=False)


def paired(layer: torch.nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
    """As vLLM's linear layers answer: with their bias."""
    return lambda x: (layer(x), None)


class AltUp(gemma3n.Gemma3nAltUp):
    """vLLM's, without its parallel layers."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.altup_num_inputs, self.altup_active_idx = NUM_INPUTS, 0
        self.correction_coefs = linear(NUM_INPUTS, NUM_INPUTS)
        self.prediction_coefs = linear(NUM_INPUTS, NUM_INPUTS**2)
        self.modality_router = linear(HIDDEN, NUM_INPUTS)
        self.router_norm = torch.nn.RMSNorm(HIDDEN)
        self.router_input_scale = torch.tensor(1 / HIDDEN)
        self.correct_output_scale = torch.nn.Parameter(torch.randn(HIDDEN))

    predict = original(gemma3n.Gemma3nAltUp, "predict")


def layer_of_gemma3n() -> SimpleNamespace:
    attend = linear(HIDDEN, HIDDEN)
    return SimpleNamespace(
        altup=AltUp(),
        altup_active_idx=0,
        self_attn=lambda positions, hidden_states: attend(hidden_states) + positions[:, None],
        laurel=linear(HIDDEN, HIDDEN),
        mlp=linear(HIDDEN, HIDDEN),
        per_layer_input_gate=linear(HIDDEN, 4),
        per_layer_projection=linear(4, HIDDEN),
        act_fn=torch.nn.GELU(),
        post_per_layer_input_norm=torch.nn.RMSNorm(HIDDEN),
        **{
            f"{place}_layernorm": torch.nn.RMSNorm(HIDDEN)
            for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        },
    )


def attention_of_minicpm3() -> SimpleNamespace:
    num_heads, plain, rotary, value, rank = 2, 4, 6, 5, 7
    size = plain + rotary
    return SimpleNamespace(
        num_local_heads=num_heads,
        qk_head_dim=size,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotary,
        v_head_dim=value,
        kv_lora_rank=rank,
        q_a_proj=paired(linear(HIDDEN, 6)),
        q_a_layernorm=torch.nn.RMSNorm(6),
        q_b_proj=paired(linear(6, num_heads * size)),
        kv_a_proj_with_mqa=paired(linear(HIDDEN, rank + rotary)),
        kv_a_layernorm=torch.nn.RMSNorm(rank),
        kv_b_proj=paired(linear(rank, num_heads * (plain + value))),
        rotary_emb=lambda positions, query, key: (query + positions[:, None], key - positions[:, None]),
        attn=lambda query, key, value: (query + 2 * key + 3 * value) * torch.arange(num_heads * size),
        o_proj=paired(linear(num_heads * value, HIDDEN)),
    )


def projections() -> list[torch.nn.Linear]:
    return [linear(HIDDEN, HIDDEN) for _ in range(NUM_INPUTS - 1)]


def cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], Any, tuple[Any, ...]]]:
    """What is replaced, with what, and what both get."""
    torch.manual_seed(0)
    positions, config = torch.arange(NUM_TOKENS), SimpleNamespace(altup_num_inputs=NUM_INPUTS)
    states_ATH, states_TH = torch.randn(NUM_INPUTS, NUM_TOKENS, HIDDEN), torch.randn(NUM_TOKENS, HIDDEN)
    return {
        "keys": (
            original(MiniCPM3Attention, "forward"),
            inspect.unwrap(views.join_keys_of_minicpm3),
            attention_of_minicpm3(),
            (positions, states_TH),
        ),
        "predict": (original(gemma3n.Gemma3nAltUp, "predict"), views._predict, AltUp(), (states_ATH,)),
        "layer": (
            original(gemma3n.Gemma3nDecoderLayer, "forward"),
            views._decode,
            layer_of_gemma3n(),
            (positions, states_ATH, torch.randn(NUM_TOKENS, 4)),
        ),
        "spread": (
            original(gemma3n.Gemma3nSelfDecoder, "altup_embed"),
            views._spread,
            SimpleNamespace(altup_projections=projections(), config=config),
            (states_TH,),
        ),
        "gather": (
            original(gemma3n.Gemma3nTextModel, "altup_unembed"),
            views._gather,
            SimpleNamespace(altup_unembed_projections=projections(), config=config),
            (states_ATH.permute(1, 2, 0),),
        ),
        "patches": (
            original(SiglipVisionEmbeddings, "forward"),
            inspect.unwrap(views.add_positions_in_siglip),
            SimpleNamespace(
                patch_embedding=torch.nn.Conv2d(3, HIDDEN, kernel_size=2, stride=2),
                position_embedding=torch.nn.Embedding(4, HIDDEN),
                position_ids=torch.arange(4)[None],
            ),
            (torch.randn(2, 3, 4, 4),),
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_l06_layers_build_new_tensors_of_what_vllm_writes_through_views(name: str) -> None:
    theirs, ours, layer, args = cases()[name]
    copies = [arg.clone() for arg in args]
    found, written = outcome(ours, theirs, layer, *args)
    if name == "layer":
        layer.altup.predict = lambda states: views._predict(theirs, layer.altup, states)
        assert torch.equal(outcome(ours, theirs, layer, *args)[0], found)
        found, written = outcome(ours, theirs, layer, *args)
    assert written == []
    assert all(torch.equal(arg, copy) for arg, copy in zip(args, copies, strict=True))
    expected, written = outcome(theirs, layer, *args)
    # Its sum of a list's element is a whole tensor's; it compares with a tensor of the host.
    assert written or name == "spread"
    torch.testing.assert_close(found, expected)


def test_gemma3n_still_makes_tensors_on_the_host() -> None:
    assert "torch.sqrt(torch.tensor(2.0))" in inspect.getsource(original(gemma3n.Gemma3nDecoderLayer, "forward"))
    assert gemma3n.EPS.device.type == "cpu"
    for owner, name in ((gemma3n.Gemma3nSelfDecoder, "altup_embed"), (gemma3n.Gemma3nTextModel, "altup_unembed")):
        assert "EPS" in inspect.getsource(original(owner, name))
    # The least number that there is: the larger of it and a magnitude is the magnitude.
    assert torch.finfo(torch.float32).min == gemma3n.EPS


class Decoder(gemma3n.Gemma3nSelfDecoder):
    """vLLM's, without its layers."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(num_hidden_layers=2, hidden_size_per_layer_input=4, vocab_size_per_layer_input=6)
        self.embed_tokens_per_layer = torch.nn.Embedding(6, 8)
        self.embed_scale_per_layer = torch.tensor(2.0)


def test_gemma3n_embeds_tokens_by_layer() -> None:
    """Ids past the embedding count as id 0, as vLLM's function for callers has it."""
    decoder, ids_T = Decoder(), torch.tensor([3, 5, 6, 7])
    model = SimpleNamespace(self_decoder=decoder, config=decoder.config)
    seen: list[Any] = []
    forward = lambda *args, **named: seen.append((args, named))  # noqa: E731
    embed_by_layer = inspect.unwrap(views.embed_tokens_by_layer_in_gemma3n)
    embed_by_layer(forward, model, ids_T, ids_T, intermediate_tensors=None)
    (_, _, _, embeddings), named = seen[0]
    expected = original(gemma3n.Gemma3nSelfDecoder, "get_per_layer_input_embeddings")(decoder, ids_T)
    assert torch.equal(embeddings, expected.reshape(4, 2, 4))
    assert named == {"intermediate_tensors": None}
    embed_by_layer(forward, model, ids_T, ids_T, expected)
    assert seen[1][0][3] is expected
    embed_by_layer(forward, model, None, ids_T, inputs_embeds=expected)
    assert seen[2][0][3] is None


def test_gemma3n_still_leaves_out_what_its_caller_does_not_have() -> None:
    """Else the patch embeds twice."""
    decoder = Decoder()
    decoder.per_layer_model_projection = linear(HIDDEN, 8)
    decoder.per_layer_projection_norm = torch.nn.Identity()
    states_TH = torch.randn(NUM_TOKENS, HIDDEN)
    found = original(gemma3n.Gemma3nSelfDecoder, "get_per_layer_inputs")(decoder, states_TH, None)
    assert torch.equal(found, decoder.per_layer_model_projection(states_TH).view(NUM_TOKENS, 2, 4))
    assert "get_per_layer_input_embeddings" not in inspect.getsource(
        original(gemma3n.Gemma3nTextModel, "normal_forward")
    )


def test_published_gemma3n_takes_tokens() -> None:
    mm = pytest.importorskip("vllm.model_executor.models.gemma3n_mm", exc_type=ImportError)
    theirs = original(mm.Gemma3nForConditionalGeneration, "forward")
    take_tokens = inspect.unwrap(views.take_tokens_in_gemma3n)
    tokens, embeddings = torch.arange(3), torch.zeros(3, HIDDEN)
    with pytest.raises(ValueError, match="inputs_embeds is required"):
        theirs(SimpleNamespace(), tokens, tokens)
    model = SimpleNamespace(language_model=lambda ids, positions: ids + positions, per_layer_embeddings=embeddings)
    assert torch.equal(take_tokens(theirs, model, tokens, tokens), 2 * tokens)
    model.language_model = SimpleNamespace(model=lambda ids, positions, **named: named)
    named: Any = take_tokens(theirs, model, None, tokens, inputs_embeds=embeddings)
    assert named["inputs_embeds"] is embeddings
    assert torch.equal(named["per_layer_inputs"], embeddings)


def test_l06_gates_of_falcon_h1_are_scaled_as_vllm_does_but_not_in_place() -> None:
    theirs, wide = original(FalconH1MLP, "forward"), 8
    layer = SimpleNamespace(
        gate_up_proj=paired(linear(HIDDEN, 2 * wide)),
        down_proj=paired(linear(wide, HIDDEN)),
        act_fn=lambda x: functional.silu(x[:, :wide]) * x[:, wide:],
        intermediate_size=wide,
        tp_size=1,
        gate_multiplier=0.3,
        down_multiplier=0.7,
    )
    x = torch.randn(NUM_TOKENS, HIDDEN)
    expected, writes = outcome(theirs, layer, x)
    found, ours = outcome(inspect.unwrap(views.scale_gates_of_falcon_h1), theirs, layer, x)
    assert writes, "vLLM changes no tensor in place any more"
    assert not ours
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("block_size", "taps"), [(4, 3), (5, 3), (2, 4)])
def test_dflash2_convolves_as_vllm_does_but_without_a_remainder(block_size: int, taps: int) -> None:
    num_groups, group_size, rows = 2, 3, 3 * block_size
    theirs = original(qwen3_dflash2, "_grouped_conv")
    args = (
        torch.randn(rows, num_groups * group_size),
        torch.randn(rows, 2, taps, num_groups)[:, 1],
        torch.randn(taps, num_groups * group_size),
        block_size,
        num_groups,
        group_size,
        taps,
    )
    with Dispatched() as in_theirs:
        expected = theirs(*args)
    with Dispatched() as in_ours:
        torch.testing.assert_close(inspect.unwrap(views.convolve_blocks_of_dflash2)(theirs, *args), expected)
    assert in_theirs.names.count("remainder") == (block_size == 5), "vLLM computes no remainder any more"
    assert "remainder" not in in_ours.names


class Suppressing(torch.nn.Module):
    """A stand-in with the attributes of vLLM's Gemma 4 that the bias reads."""

    def __init__(self, suppressed: list[int] | None) -> None:
        super().__init__()
        self._suppress_token_ids = suppressed
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=6))

    def compute_logits(self, logits_NV: torch.Tensor | None) -> torch.Tensor | None:
        assert not self._suppress_token_ids
        return logits_NV


@pytest.mark.parametrize("suppressed", [None, [], [1, 4]])
def test_gemma4_forbids_tokens_by_a_bias(suppressed: list[int] | None) -> None:
    model, logits_NV = Suppressing(suppressed), torch.randn(3, 6, dtype=torch.bfloat16)
    views.suppress_tokens_by_bias(model, torch.bfloat16)
    expected = logits_NV.index_fill(1, torch.tensor(suppressed or [], dtype=torch.int64), -torch.inf)
    found = model.compute_logits(logits_NV)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert model.compute_logits(None) is None, "only some ranks have logits"
    assert not model.state_dict(), "checkpoints have no such tensor"


@pytest.mark.parametrize(
    ("module", "name"), [("gemma4_mm", "Gemma4ForConditionalGeneration"), ("gemma4_mtp", "Gemma4MTP")]
)
def test_gemma4_still_fills_logits_by_index(module: str, name: str) -> None:
    found = pytest.importorskip(f"vllm.model_executor.models.{module}", exc_type=ImportError)
    assert "index_fill_" in inspect.getsource(original(getattr(found, name), "compute_logits"))
    assert "        self._suppress_token_ids = " in inspect.getsource(found)
