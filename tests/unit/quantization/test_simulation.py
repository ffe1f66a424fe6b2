"""Which modules of a model are measured or quantized, and scales that are not its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8_calibration.observers import Measured
from fp8_calibration.writing import write_files
from tests.unit.quantization.test_quant_config import read
from vllm_gaudi_spec.attention.operations import Matmul, Softmax, VLLMKVCache
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.quantization import files, simulation
from vllm_gaudi_spec.quantization.config import LoadContext
from vllm_gaudi_spec.quantization.files import Node, Record
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic

METHOD = "maxabs_pow2"
ALONE = LoadContext(model="", rank=0, world=1, fp8_range=None)


class Impl(nn.Module):
    dtype, kv_dtype = torch.float32, None

    def __init__(self) -> None:
        super().__init__()
        self.k_cache, self.v_cache = VLLMKVCache(), VLLMKVCache()
        self.matmul_qk, self.softmax, self.matmul_av = Matmul(), Softmax(), Matmul()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.impl, self.first, self.norm, self.last = Impl(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4)


LINEARS = ["first", "last"]
ALL = ["impl.k_cache", "impl.v_cache", "impl.matmul_qk", "impl.softmax", "impl.matmul_av", *LINEARS]


def scales(**changes: Any) -> Record:
    one = np.float32(0.5)
    per_channel = {0: np.full(6, one), 1: np.ones(8, np.float32)}
    nodes = {
        "impl.k_cache": Node([one]),
        "impl.v_cache": Node([one]),
        "impl.matmul_qk": Node([one, one]),
        "impl.softmax": Node([], [one]),
        "impl.matmul_av": Node([one, one]),
        "first": Node([one], params={"weight": per_channel}),
        "last": Node([one], params={"weight": one}),
    }
    fields = {"rank": 0, "world": 1, "mode": files.SCALED, "nodes": nodes}
    return Record(**(fields | changes))


def apply(
    folder: Path,
    record: Record | None = None,
    apart: tuple[str, ...] = (),
    fp8_range: str | None = None,
    **fields: Any,
) -> Model:
    if record is not None:
        write_files(folder / "inc", record, METHOD)
    model = Model()
    context = replace(ALONE, fp8_range=fp8_range, apart=[model.get_submodule(name) for name in apart])
    config = read(folder, dump_stats_path=str(folder / "inc"), **dict(scale_method=METHOD) | fields)
    simulation.apply(model, config, context, HostArithmetic)
    return model


def replaced(model: Model) -> list[str]:
    plain = {name: type(module).__name__ for name, module in Model().named_modules()}
    parts = {name: type(model.get_submodule(name)).__name__ for name in ALL}
    served = [name for name in LINEARS if hasattr(model.get_submodule(name), "served_by")]
    return [name for name in ALL if parts[name] != plain[name] or name in served]


def test_blocked_and_shared_modules_are_not_quantized(tmp_path: Path) -> None:
    blocked = {"names": ["^last$"], "types": ["Softmax"]}
    caches = "impl.k_cache", "impl.v_cache"
    model = apply(tmp_path, scales(), apart=caches, blocklist=blocked)
    assert replaced(model) == [n for n in ALL if n not in ("last", "impl.softmax", *caches)]
    assert model.impl.kv_dtype is None


def test_scales_for_only_keys_or_values_are_refused(tmp_path: Path) -> None:
    """On a card the other half would be written to a cache of another dtype."""
    blocked = {"names": ["v_cache"]}
    with pytest.raises(UnsupportedConfigError, match="quantizes k_cache of impl but not v_cache"):
        apply(tmp_path, scales(), blocklist=blocked)


def test_q22_modules_without_scales(tmp_path: Path) -> None:
    record = scales()
    del record.nodes["last"], record.nodes["impl.softmax"]
    with pytest.raises(UnsupportedConfigError, match=r"2 of 7 modules have no scales .* the first is impl\.softmax"):
        apply(tmp_path, record)
    model = apply(tmp_path, record, ignore_modules_wo_measures="true")
    assert replaced(model) == [name for name in ALL if name not in ("last", "impl.softmax")]


@pytest.mark.parametrize(
    "node",
    [
        Node([np.float32(1)], params={"weight": {0: np.ones(5, np.float32), 1: np.ones(8, np.float32)}}),
        Node([np.float32(1)], params={"weight": {0: np.ones(6, np.float32), 1: np.full(8, 2, np.float32)}}),
        Node([np.float32(1)], params={"weight": np.ones(6, np.float32)}),
        Node([np.float32(0)], params={"weight": np.float32(1)}),
        Node([], params={"weight": np.float32(1)}),
        Node([np.float32(1)]),
    ],
    ids=["rows", "columns", "not by axis", "zero", "no input", "no weight"],
)
def test_scales_of_another_module_are_refused(node: Node, tmp_path: Path) -> None:
    record = scales()
    record.nodes["first"] = node
    with pytest.raises(UnsupportedConfigError, match=r"QUANT_CONFIG: the scales of first at .* do not fit"):
        apply(tmp_path, record)


def test_missing_or_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match=r"QUANT_CONFIG: .*world size 2, not 1"):
        apply(tmp_path, scales(rank=1, world=2))
    with pytest.raises(UnsupportedConfigError, match="QUANT_CONFIG: no scale files"):
        apply(tmp_path, scale_method="maxabs_hw")


def test_scales_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are known by their weights."""
    monkeypatch.setattr(simulation, "fingerprint", lambda model: "mine")
    apply(tmp_path, scales(model="mine"))
    apply(tmp_path, scales(model=""))
    with pytest.raises(UnsupportedConfigError, match=r"QUANT_CONFIG: the scales at .* are for a different model than"):
        apply(tmp_path, scales(model="another"))
    monkeypatch.setattr(simulation, "fingerprint", lambda model: "")
    apply(tmp_path, scales(model="another"))


def test_range_is_that_of_the_scales(tmp_path: Path) -> None:
    """Unless the device has one."""
    for card, largest in (("gaudi2", 240.0), ("gaudi3", 448.0), ("", 240.0)):
        model = apply(tmp_path, scales(device=card))
        assert model.impl.softmax.output(torch.tensor([1e4])).item() == largest


def test_scales_for_another_card_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="are for gaudi2, but this device computes like gaudi3"):
        apply(tmp_path, scales(device="gaudi2"), fp8_range="gaudi3")


def test_measuring_needs_the_calibrations_observers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "measure", None)
    with pytest.raises(UnsupportedConfigError, match=r"run that, or use mode QUANTIZE\.$"):
        simulation.apply(Model(), read(tmp_path, mode="MEASURE"), ALONE, HostArithmetic)


def test_measurements_are_written_only_after_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "measure", Measured)
    model, config = Model(), read(tmp_path, mode="MEASURE", dump_stats_path=str(tmp_path / "inc"))
    measured = simulation.apply(model, config, ALONE, HostArithmetic)
    measured.write()
    assert not list(tmp_path.glob("inc*"))  # what an earlier run wrote stays
    x = torch.randn(3, 8)
    with measured.counting(torch.tensor([True, True, False])):
        model.first(x)
    measured.write()
    (record,) = files.read_world(tmp_path / "inc")
    assert record.looked_at == ALL
    assert list(record.nodes) == ["first"]
    assert record.nodes["first"].inputs[0].item() == x[:2].abs().amax().item()
