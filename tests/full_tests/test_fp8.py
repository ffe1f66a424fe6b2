"""FP8 on the CPU: a target in FP8 says with drafts what it says without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full_tests import heads
from tests.full_tests.engines import counter, engine
from tests.full_tests.quantized import METHODS, Calibrated, ask, calibrate, drafter, drafting, quantizing
from tests.full_tests.speculation import accepted, ngram
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.layers import CalibratedLinear

STRICT = dict(rejection_sample_method="strict")
SIZES: dict[str, Any] = dict(max_num_seqs=8, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def calibrated(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return calibrate(tmp_path_factory.mktemp("scales"), looping_llama, drafting(looping_llama), **SIZES)


@pytest.fixture(scope="module")
def alone(looping_llama: str, calibrated: Calibrated) -> Callable[[str], list[list[int]]]:
    known: dict[str, list[list[int]]] = {}

    def answers(method: str) -> list[list[int]]:
        if method not in known:
            with quantizing(calibrated.serving("target", method)), engine(looping_llama, **SIZES) as llm:
                known[method] = ask(llm, 8)
        return known[method]

    return answers


def test_every_layer_is_measured(calibrated: Calibrated) -> None:
    for role in calibrated.roles:
        (record,) = files.read_world(calibrated.prefix(role))
        assert set(record.looked_at) == set(record.nodes)
        layers = [name for name in record.nodes if ".layers.0." in name]
        assert sorted(name.rpartition("layers.0.")[2] for name in layers) == [
            "mlp.down_proj",
            "mlp.gate_up_proj",
            "self_attn.attn.impl.k_cache",
            "self_attn.attn.impl.matmul_av",
            "self_attn.attn.impl.matmul_qk",
            "self_attn.attn.impl.softmax",
            "self_attn.attn.impl.v_cache",
            "self_attn.o_proj",
            "self_attn.qkv_proj",
        ]
        attention = "model.layers.1.self_attn.attn.impl."
        keys, values = (record.nodes[f"{attention}{name}"].inputs[0] for name in ("k_cache", "v_cache"))
        assert np.array_equal(record.nodes[f"{attention}matmul_qk"].inputs[1], keys)
        assert np.array_equal(record.nodes[f"{attention}matmul_av"].inputs[1], values)
        assert record.nodes[f"{attention}softmax"].outputs[0].item() == 1
        assert record.nodes["lm_head"].params["weight"].shape == (448, 1)  # a padded vocabulary


CASES = [("maxabs_pow2", "model")]
ALL = [(method, kind) for method in METHODS for kind in ("ngram", "model", "model of float32")]


@pytest.mark.parametrize(("method", "kind"), quick_and_slow(CASES, ALL))
def test_drafts_are_lossless(
    method: str, kind: str, looping_llama: str, calibrated: Calibrated, alone: Callable[[str], list[list[int]]]
) -> None:
    speculative = ngram(5, **STRICT) if kind == "ngram" else drafting(looping_llama)
    draft = drafter(calibrated.serving("draft", method) if kind == "model" else None)
    without_drafts = alone(method)
    with (
        quantizing(calibrated.serving("target", method)),
        engine(looping_llama, speculative_config=speculative, **draft, **SIZES) as llm,
    ):
        assert ask(llm, 8) == without_drafts
        assert accepted(llm) > (5 if kind == "ngram" else 50)


@pytest.mark.slow
def test_drafter_in_fp8_does_not_change_the_target(looping_llama: str, calibrated: Calibrated) -> None:
    """What its drafts are worth differs, and what is said does not."""
    said, taken = [], []
    for config in (None, calibrated.serving("draft", "maxabs_arbitrary")):
        with engine(looping_llama, speculative_config=drafting(looping_llama), **drafter(config), **SIZES) as llm:
            said.append(ask(llm, 8))
            taken.append(accepted(llm))
    assert said[0] == said[1]
    assert taken[0] > taken[1] > 20  # one is the target itself


@pytest.mark.slow
@pytest.mark.parametrize("method", heads.METHODS[:2])
def test_heads_are_lossless(method: str, tmp_path: Path) -> None:
    """Some of a head is the target's: it stays what the target has."""
    target, head = heads.target(method), heads.head(method, 3, **STRICT)
    found = calibrate(tmp_path, target, head, **SIZES)
    config = found.serving("target", "maxabs_pow2")
    with quantizing(config), engine(target, **SIZES) as llm:
        alone = ask(llm, 8)
    for own in (None, found.serving("draft", "maxabs_pow2")):
        with quantizing(config), engine(target, speculative_config=head, **drafter(own), **SIZES) as llm:
            assert ask(llm, 8) == alone
            assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 20


@pytest.mark.parametrize("family", ["deepseek-v3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_experts_and_latent_attention_stay_unquantized(family: str, made: Callable[[str], str], tmp_path: Path) -> None:
    """What is around them is measured, and runs in FP8."""
    model = made(family)
    found = calibrate(tmp_path, model, None, **SIZES)
    (record,) = files.read_world(found.prefix("target"))
    layer = {name.rpartition("layers.1.")[2] for name in record.nodes if ".layers.1." in name}
    assert layer == AROUND[family]
    config, drafts = found.serving("target", "maxabs_pow2"), ngram(3, **STRICT)
    with quantizing(config), engine(model, speculative_config=drafts, **SIZES) as llm:
        (modules,) = llm.collective_rpc(lambda worker: [*worker.model_runner.target.model.named_modules()])
        changed = [name for name, part in modules if isinstance(getattr(part, "quant_method", None), CalibratedLinear)]
        assert {name.rpartition("layers.1.")[2] for name in changed if ".layers.1." in name} == {
            name for name in layer if name.endswith("proj")
        }
        assert ask(llm, 8, extra_args={REQUEST_OPTION: 0}) == ask(llm, 8)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 5


AROUND = {
    "deepseek-v3": {
        "self_attn.q_b_proj",
        "self_attn.o_proj",
        "mlp.shared_experts.gate_up_proj",
        "mlp.shared_experts.down_proj",
    },
    "mixtral": {
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        *(f"self_attn.attn.impl.{part}" for part in ("k_cache", "v_cache", "matmul_qk", "matmul_av", "softmax")),
    },
}
