"""What is measured, against maxima that torch takes of the real rows."""

import pytest
import torch
from torch import nn

from fp8_calibration.observers import MeasuredCache, MeasuredLinear, MeasuredMatmul, MeasuredSoftmax, RealTokens
from vllm_gaudi_spec.quantization.layers import serve_linear

REAL = torch.tensor([True, True, False, True, False])


def forwards(seed: int, *shape: int) -> list[torch.Tensor]:
    """Padding is the largest of all."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(5, *shape, generator=generator) * size for size in (1.0, 3.0, 2.0)]
    for x in made:
        x[~REAL] *= 1000
    return made


def largest(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x[REAL].abs().amax() for x in tensors]).amax().view(1, 1)


@pytest.mark.parametrize("has_outputs", [False, True])
def test_linear(has_outputs: bool) -> None:
    torch.manual_seed(0)
    layer, tokens = nn.Linear(8, 6), RealTokens()
    plain = nn.Linear(8, 6)
    plain.load_state_dict(layer.state_dict())
    measured = MeasuredLinear(layer, tokens, measures_outputs=has_outputs, measures_sums=has_outputs)
    serve_linear(layer, measured)
    inputs = forwards(0, 8)
    for x in inputs:
        with tokens.counting(REAL):
            torch.testing.assert_close(layer(x), plain(x))
    layer(inputs[0] * 1e6)  # outside of a forward
    assert torch.equal(measured.input.largest, largest(inputs))
    assert torch.equal(measured.weight_N1, plain.weight.abs().amax(1, keepdim=True))
    assert len(measured.outputs()) == 2 * has_outputs
    if has_outputs:
        products = [nn.functional.linear(x, plain.weight) for x in inputs]
        torch.testing.assert_close(measured.outputs()[0].largest, largest(products))
        torch.testing.assert_close(measured.outputs()[1].largest, largest([plain(x) for x in inputs]))


def test_caches_and_attention() -> None:
    tokens = RealTokens()
    cache, matmul, softmax = MeasuredCache(tokens), MeasuredMatmul(), MeasuredSoftmax()
    stored, slots = torch.zeros(16, 2, 4), torch.tensor([3, 4, 0, 5, 0])
    inputs = forwards(1, 2, 4)
    for x in inputs:
        with tokens.counting(REAL):
            cache(x, stored, slots)
            matmul(tokens.mask(x), torch.ones(4, 3))
        assert torch.equal(stored[slots[REAL]], x[REAL])
    assert torch.equal(cache.input.largest, largest(inputs))
    assert torch.equal(matmul.input.largest, largest(inputs))
    weights = softmax(inputs[0], -1)
    assert torch.equal(softmax.output.largest, weights.amax().view(1, 1))


def test_warm_up_leaves_nothing() -> None:
    tokens = RealTokens()
    layer = nn.Linear(8, 6)
    measured = MeasuredLinear(layer, tokens, measures_outputs=True, measures_sums=False)
    serve_linear(layer, measured)
    with tokens.counting(torch.zeros(5, dtype=torch.bool)):
        layer(torch.randn(5, 8))
    assert measured.input.largest.item() == measured.outputs()[0].largest.item() == 0
