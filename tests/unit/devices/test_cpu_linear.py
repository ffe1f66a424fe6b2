"""Linear layers on the CPU: what each format keeps of a weight, and its results."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from vllm import _custom_ops as vllm_ops
from vllm.config import VllmConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_gaudi_spec.config import Options, UnsupportedConfigError
from vllm_gaudi_spec.devices.cpu import linear as cpu_linear
from vllm_gaudi_spec.devices.cpu.linear import FEW_ROWS, ByRows, Float16Linear

ROWS = (1, 2, 3, 5, 8, 13, FEW_ROWS, FEW_ROWS + 1, 70)
SHAPES = ((192, 64), (96, 160), (80, 36))


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a weight as in a checkpoint of `dtype`, run in float32, with values that float16 has only when scaled."""
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.1
    weight[:, 0] = 2.0**-30
    return weight.to(dtype).float()


def layer_of(weight: torch.Tensor, choice: str | None, keep: bool = False) -> nn.Module:
    """Return a layer after vLLM's loader packed it."""
    layer = nn.Module()
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    pack(layer, choice, keep)
    return layer


def pack(layer: nn.Module, choice: str | None, keep: bool) -> None:
    options = {} if choice is None else {"cpu_weights": choice}
    with set_current_vllm_config(VllmConfig(additional_config={"gaudi_spec": options})):
        original = utils.dispatch_cpu_unquantized_gemm
        cpu_linear.pack(getattr(original, "__wrapped__", original), layer, not keep)


def apply(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return layer.cpu_linear(x, layer.weight, bias)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("choice", [None, "float32", "float16"])
def test_bfloat16_checkpoints_are_exact_in_float16(choice: str | None, shape: tuple[int, int]) -> None:
    weight = weight_of(shape)
    layer = layer_of(weight, choice)
    bias = torch.randn(shape[0])
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected = F.linear(x.double(), weight.double(), bias.double())
        assert (apply(layer, x, bias) - expected).abs().max() < 2e-6 * shape[1] ** 0.5
    identity = torch.eye(shape[1])[:FEW_ROWS]
    assert torch.equal(apply(layer, identity), weight.t()[:FEW_ROWS])


def test_weights_beyond_float16_stay_float32_by_default() -> None:
    weight = weight_of((96, 64), torch.float32)
    assert Float16Linear.exact(weight) is None
    assert not isinstance(layer_of(weight, None).cpu_linear, ByRows)
    assert isinstance(layer_of(weight_of((96, 64)), None).cpu_linear, ByRows)
    x = torch.randn(4, 64)
    expected = F.linear(x, weight)
    error = (apply(layer_of(weight, "float16"), x) - expected).abs().max() / expected.abs().max()
    assert 0 < error < 2**-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bit_weights_are_float32(dtype: torch.dtype) -> None:
    weight = (torch.randn(300, 64) * 0.1).to(dtype)
    head = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    head.weight = nn.Parameter(weight.clone(), requires_grad=False)
    pack(head, None, keep=True)
    bias = torch.randn(300).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 64).to(dtype)
        logits = apply(head, x, bias)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, F.linear(x.double(), weight.double(), bias.double()).float())
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="a CPU without AVX-512, whose kernels round otherwise for other rows"
)
@pytest.mark.parametrize("choice", [None, "float16"])
def test_result_does_not_depend_on_the_number_of_few_rows(choice: str | None) -> None:
    """So a verify step rounds as a plain step, as long as both have few rows."""
    for shape in SHAPES:
        layer = layer_of(weight_of(shape), choice)
        x = torch.randn(FEW_ROWS, shape[1])
        alone = torch.cat([apply(layer, row[None]) for row in x])
        for rows in ROWS:
            assert torch.equal(apply(layer, x[:rows]), alone[:rows])


@pytest.mark.parametrize("choice", [None, "float16"])
def test_weights_are_freed_and_embedding_tables_kept(choice: str | None) -> None:
    weight = weight_of((96, 64))
    assert layer_of(weight, choice).weight.numel() == 0
    table = layer_of(weight, choice, keep=True)
    assert torch.equal(table.weight, weight)
    tied = nn.Module()
    tied.weight = table.weight
    pack(tied, choice, keep=True)
    assert tied.cpu_linear is table.cpu_linear  # not a second copy
    x = torch.randn(3, 64)
    assert torch.allclose(apply(tied, x), F.linear(x, weight), atol=1e-4)


def test_weight_that_vllm_does_not_pack_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_ops, "_supports_onednn", False)
    for dtype in (torch.bfloat16, torch.float32):
        weight = weight_of((96, 64), dtype)
        layer = layer_of(weight, None)
        for rows in ROWS:
            x = torch.randn(rows, 64)
            assert torch.allclose(apply(layer, x), F.linear(x, weight), atol=1e-5)


def test_missing_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_float16_kernel", lambda: False)
    cpu_linear.refuse_missing_kernel(Options())
    with pytest.raises(UnsupportedConfigError, match="float16 has no kernel for this CPU; use float32"):
        cpu_linear.refuse_missing_kernel(Options(cpu_weights="float16"))


def test_weights_of_one_shape_are_packed_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """oneDNN packs by the number of threads, and vLLM caches its primitives by shape, so one weight would read noise.

    An engine with several ranks lowers the number in the process that makes it, where another engine may follow.
    """
    monkeypatch.setattr(cpu_linear._State, "num_threads", None)
    before = torch.get_num_threads()
    errors = []
    try:
        for num_threads in (2, 1):
            torch.set_num_threads(num_threads)
            torch.manual_seed(num_threads)
            weight = torch.randn(160, 48)  # a shape with two packed layouts
            layer = layer_of(weight, "float32")
            for rows in (1, 8, 33, 64):
                x = torch.randn(rows, 48)
                errors.append(float((apply(layer, x) - F.linear(x, weight)).abs().max()))
    finally:
        torch.set_num_threads(before)
    assert max(errors) < 1e-4, errors
    assert "torch has 1 threads, but it had 2 when this process loaded" in caplog.text
