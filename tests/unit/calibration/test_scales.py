"""Scales against those that Intel Neural Compressor makes, and our files in its own readers and its own `convert`.

It runs on a CPU, but for two functions of torchao that cast to FP8: only those have a stand-in.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp8_calibration.folder import measuring_config, serving_config
from fp8_calibration.scales import CARDS, SCALE_METHODS, expand, make_scales
from fp8_calibration.writing import write_files
from tests.support.measurements import measured
from tests.support.processes import forget_bridge
from vllm_gaudi_spec.quantization import files
from vllm_gaudi_spec.quantization.files import MEASURED, LinearShape, Node, Part, Record

ROWS, COLUMNS = 24, 16


@pytest.fixture(scope="module")
def inc() -> Iterator[SimpleNamespace]:
    """It looks for a card when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        forget_bridge(patch)
        from neural_compressor.torch.algorithms.fp8_quant._core import common
        from neural_compressor.torch.algorithms.fp8_quant._core.scale_methods import ops_quantizer, scale_method_config
        from neural_compressor.torch.algorithms.fp8_quant._quant_common import quant_config
        from neural_compressor.torch.algorithms.fp8_quant.model_configs import ModuleConfig
        from neural_compressor.torch.algorithms.fp8_quant.prepare_quant import prepare_model
        from neural_compressor.torch.utils.auto_accelerator import INCAcceleratorType

        yield SimpleNamespace(
            cards={"gaudi2": INCAcceleratorType.GAUDI2, "gaudi3": INCAcceleratorType.GAUDI3},
            **{module.__name__.rpartition(".")[2]: module for module in (common, ops_quantizer, scale_method_config)},
            **{module.__name__.rpartition(".")[2]: module for module in (quant_config, prepare_model)},
            ModuleConfig=ModuleConfig,
        )


def theirs(inc: SimpleNamespace, kind: str, node: Node, method: str, card: str, weight: torch.Tensor | None) -> Any:
    """The scales that it makes of a measurement, with the weight at hand."""
    module = torch.nn.Module()
    if weight is not None:
        module.weight = torch.nn.Parameter(weight)
    settings = dict(mod_dict={"Module": kind}, dynamic_quantization=False, use_qdq=False, fake_quant=False)
    settings |= dict(scale_format=inc.quant_config.ScaleFormat.CONST, device_for_scales=inc.cards[card])
    settings |= dict(row_parallel_linear_allreduce_quantization=False)
    module.__hqt_config__ = SimpleNamespace(cfg=settings)
    names = inc.scale_method_config
    quantizer = inc.ops_quantizer.get_op_quantizer(
        names.scale_method_config_mapping[names.ScaleMethodString[method.upper()]],
        module,
        inc.ModuleConfig(node.inputs, node.outputs or (None,), node.params),
        {"lp_dtype": torch.float8_e4m3fn, "hp_dtype": torch.bfloat16},
        "Module",
    )
    return quantizer.get_scales_module_config()


def equal(ours: np.ndarray, theirs: torch.Tensor) -> None:
    np.testing.assert_array_equal(ours, theirs.detach().float().numpy(), strict=True)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("method", SCALE_METHODS)
def test_scales_are_those_of_neural_compressor(inc: SimpleNamespace, method: str, card: str) -> None:
    rng = np.random.default_rng(0)
    names = {"o_proj": "row_parallel_linear", "up": "linear", "matmul_qk": "matmul", "k_cache": "kv_cache"}
    names["softmax"] = "softmax"
    shapes = {name: LinearShape("whole", (Part(ROWS),), COLUMNS) for name in ("o_proj", "up")}
    for _ in range(40):
        a, b, c = (np.exp(rng.normal(size=(1, 1)) * 4).astype(np.float32) for _ in range(3))
        weight = torch.from_numpy(rng.normal(size=(ROWS, COLUMNS)) * np.exp(rng.normal() * 4)).to(torch.bfloat16)
        weight[3] = 0.0
        channels = {"weight": weight.abs().amax(1, keepdim=True).float().numpy()}
        nodes = {
            "o_proj": Node([a], [b, c], channels),
            "up": Node([a], [], channels),
            "matmul_qk": Node([a, b]),
            "k_cache": Node([c]),
            "softmax": Node([a], [b]),
        }
        (ours,) = make_scales([Record(0, 1, MEASURED, nodes, list(nodes), "", shapes)], method, card)
        for name, kind in names.items():
            made = ours.nodes[name]
            expected = theirs(inc, kind, nodes[name], method, card, weight if nodes[name].params else None)
            assert len(made.inputs) == len(expected.inputs)
            for one, other in zip([*made.inputs, *made.outputs], [*expected.inputs, *expected.outputs], strict=True):
                equal(one, other)
            for one, other in zip(made.params.values(), expected.params.values(), strict=True):
                if isinstance(other, dict):
                    for axis in (0, 1):
                        equal(one[axis], other[axis])
                else:
                    equal(one, other)


@pytest.mark.parametrize("method", ["maxabs_hw", "act_maxabs_pow2_weights_pcs_maxabs_pow2"])
def test_its_readers_read_our_files(inc: SimpleNamespace, tmp_path: Path, method: str) -> None:
    ranks = expand(measured(), 2)
    for record, made in zip(ranks, make_scales(ranks, method, "gaudi3"), strict=True):
        stem = write_files(tmp_path / "inc", record)
        loaded = inc.common.load_file(f"{stem}.npz", np.ndarray, True)
        assert loaded.keys() == record.nodes.keys()
        for name, node in record.nodes.items():
            assert [values.tolist() for values in loaded[name].inputs] == [values.tolist() for values in node.inputs]
            assert {k: v.tolist() for k, v in loaded[name].params.items()} == {
                k: v.tolist() for k, v in node.params.items()
            }
        stem = write_files(tmp_path / "inc", made, method)
        loaded = inc.common.load_scales(f"{stem}.npz", np.ndarray)
        tensors = inc.common.convert_scales_to_tensors_dict(loaded, np.ndarray, torch.bfloat16)
        for name, node in made.nodes.items():
            for one, other in zip(node.inputs, tensors[name].inputs, strict=True):
                equal(one, other)
            for axis, values in node.params.get("weight", {}).items() if method.startswith("act") else ():
                equal(values, tensors[name].params["weight"][axis])


@pytest.fixture
def one_rank(inc: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It asks once for the rank, which stands in the names of files."""
    for name in ("_world_size_initialized", "_local_rank_initialized"):
        monkeypatch.setattr(inc.prepare_model, name, False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return


@pytest.mark.parametrize("method", SCALE_METHODS)
def test_it_looks_for_files_where_we_write_them(
    inc: SimpleNamespace, one_rank: None, tmp_path: Path, method: str
) -> None:
    prefix = tmp_path / "inc"
    parsed = inc.quant_config.Fp8cfg.parse(serving_config(prefix, method, ["lm_head"], ["a.b"]) | {"use_qdq": True}).cfg
    assert parsed["measure_file"] == str(files.stem(prefix, 0, 1))
    assert parsed["scale_file"] == str(files.stem(prefix, 0, 1, method))
    assert parsed["blocklist"]["names"] == ["lm_head", r"^a\.b$"]
    measure = inc.quant_config.Fp8cfg.parse(measuring_config(prefix) | {"use_qdq": True}).cfg
    assert measure["measure_file"] == str(files.stem(prefix, 0, 1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.down = torch.nn.Linear(ROWS, COLUMNS, bias=False)


@pytest.mark.parametrize("method", ["maxabs_pow2", "act_maxabs_pow2_weights_pcs_maxabs_pow2"])
def test_it_quantizes_a_model_by_our_files(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    casts = ModuleType("torchao.quantization.quant_primitives")
    casts._quantize_affine_float8 = lambda tensor, scale, float8_dtype: (tensor / scale).to(float8_dtype)
    casts._dequantize_affine_float8 = lambda tensor, scale, output_dtype: tensor.to(output_dtype) * scale
    for name in ("torchao", "torchao.quantization", casts.__name__):
        monkeypatch.setitem(sys.modules, name, casts)
    from neural_compressor.torch.quantization import FP8Config, convert

    model = Model().to(torch.bfloat16)
    nodes, shapes = {}, {}
    for name, linear in model.named_children():
        channels = linear.weight.detach().abs().amax(1, keepdim=True).float().numpy()
        nodes[name] = Node([np.full((1, 1), 3.0, np.float32)], [], {"weight": channels})
        shapes[name] = LinearShape("whole", (Part(linear.out_features),), linear.in_features)
    record = Record(0, 1, MEASURED, nodes, list(nodes), "", shapes)
    write_files(tmp_path / "inc", record)
    (made,) = make_scales([record], method, "gaudi3")
    for node in made.nodes.values():  # so that it shows whose scales these are
        node.inputs = [scale * 4 for scale in node.inputs]
    write_files(tmp_path / "inc", made, method)
    config = tmp_path / "quant.json"
    config.write_text(json.dumps(serving_config(tmp_path / "inc", method, [], []) | {"use_qdq": "True"}))
    weights = {name: linear.weight.detach().clone() for name, linear in model.named_children()}

    converted = convert(model, FP8Config.from_json_file(str(config)))

    for name, linear in converted.named_children():
        assert float(linear.quant_input.scale) == float(made.nodes[name].inputs[0])
        weight = made.nodes[name].params["weight"]
        scale = torch.from_numpy(np.atleast_1d(weight[0] if isinstance(weight, dict) else weight))
        np.testing.assert_array_equal(np.atleast_1d(torch.as_tensor(linear.dequant_weights.scale).float()), scale)
        stored = linear.weight.detach().float().T * scale[:, None]  # INC keeps it transposed
        assert (stored - weights[name].float()).abs().max() <= weights[name].float().abs().max() / 16
