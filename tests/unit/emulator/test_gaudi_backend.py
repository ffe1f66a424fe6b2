"""The Gaudi backend on the emulated card, and tests/emulated_compiled in a process of its own."""

import os
from typing import Any

import pytest
import torch

from card_emulator import kernels, report
from card_emulator.testing import graph, hpu
from tests.support.processes import run_tests
from vllm_gaudi_spec.devices.hpu.backend import make_backend
from vllm_gaudi_spec.devices.hpu.fp8 import GaudiArithmetic
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic, to_e4m3

THIS_FILE = os.path.basename(__file__)


def test_the_backend_is_never_to_blame(card: Any) -> None:
    """The report names the line that asked the backend for a copy, a wait or a capture."""
    backend = make_backend()

    def step() -> torch.Tensor:
        double = backend.graphs.graph(lambda x: x * 2)
        x = backend.memory.upload(torch.ones(2))
        download = backend.memory.start_download(double(x))
        backend.memory.synchronize()
        return download()

    first = step.__code__.co_firstlineno
    assert step().tolist() == [2.0, 2.0]
    expected = {"graph capture": {3}, "device-to-host sync": {3}, "sync": {4, 5}}
    for kind, lines in expected.items():
        found = {where.split(" ")[0].rpartition("/")[2] for where in card.counters.lines(kind)}
        assert found == {f"{THIS_FILE}:{first + line}" for line in lines}
    assert f"{THIS_FILE}:{first + 3} (step)" in report.as_json(card)["graphs"][0]["where"]

    def careless(x: torch.Tensor) -> torch.Tensor:
        return backend.memory.start_download(x)()

    graph = backend.graphs.graph(careless)
    with pytest.raises(RuntimeError, match=rf"{THIS_FILE}:\d+ \(careless\)"):
        graph(hpu(1))


@pytest.mark.parametrize("pinned", [True, False])
def test_h01_h02_downloads_have_arrived_when_they_are_read(
    card: Any, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pinned:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    memory = make_backend().memory
    run = graph(lambda x: x + 1)
    # Three under way at once, while the graph overwrites its output; then buffers are used a second time.
    for first in (0, 3):
        downloads = [memory.start_download(run(hpu(number))) for number in range(first, first + 3)]
        assert [download().item() for download in downloads] == [first + 1, first + 2, first + 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_has_the_bits_of_the_cpus_simulation(card: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 96) * 40).to(dtype), to_e4m3(torch.randn(96, 30) * 50, 240.0)
    x_scale, y_scales = torch.tensor(0.013), torch.rand(30) + 0.1
    host, ours = HostArithmetic(240.0), GaudiArithmetic(240.0)
    values = ours.cast(x.to("hpu"), (1 / x_scale).to("hpu"))
    expected = host.cast(x, 1 / x_scale)
    assert torch.equal(values.cpu().double(), expected)
    back = ours.uncast(values, x_scale.to("hpu"), dtype)
    assert torch.equal(back.cpu(), host.uncast(expected, x_scale, dtype))
    product = ours.multiply(values, ours.keep(weight.to("hpu")), x_scale.to("hpu"), y_scales.to("hpu"), dtype)
    assert torch.equal(product.cpu(), host.multiply(expected, host.keep(weight), x_scale, y_scales, dtype))


@pytest.mark.parametrize("inverse", [torch.tensor(2.0), torch.tensor([[2.0], [3.0]])], ids=["per tensor", "per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q01_the_range_is_not_left_to_the_cards_cast(
    card: Any, dtype: torch.dtype, inverse: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No source says what a card's cast returns past its range. Here it returns NaN, like torch's own."""

    def to_e4m3_or_nan(x: torch.Tensor, largest: float) -> torch.Tensor:
        # Numbers that round down to the largest one are within the range.
        is_past = x.abs() > largest * (1 + 2.0**-5)
        return x.float().masked_fill(is_past, torch.nan).clamp(-largest, largest).to(torch.float8_e4m3fn)

    monkeypatch.setattr(kernels, "to_e4m3", to_e4m3_or_nan)
    x = torch.tensor([[121.0, -1e30], [3.0, -torch.inf]], dtype=dtype)
    assert torch.ops.hpu.cast_to_fp8_v2(x.to("hpu"), None)[0].cpu().float().isnan().any()
    found = GaudiArithmetic(240.0).cast(x.to("hpu"), inverse.to("hpu")).cpu().double()
    assert torch.equal(found, HostArithmetic(240.0).cast(x, inverse))


def test_the_compiler() -> None:
    run_tests("tests/emulated_compiled")
