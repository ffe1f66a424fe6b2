"""Make scales from measurements, with the arithmetic of Intel Neural Compressor (INC).

FP8 holds x / scale. Every operation is in bfloat16, as in INC, so that a Gaudi gets the numbers that INC would make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_gaudi_spec.config import E4M3_MAX, GAUDI2, GAUDI3
from vllm_gaudi_spec.quantization.files import SCALED, Node, QuantFilesError, Record

_BITS = torch.bfloat16


@dataclass(frozen=True)
class Fp8Card:
    """The range of a card's FP8, and the scales that its matrix engine applies at no cost."""

    largest: float
    smallest_scale: float
    largest_scale: float
    steps: int
    """Difference between the binary exponents of neighboring scales."""


CARDS = {
    GAUDI2: Fp8Card(E4M3_MAX[GAUDI2], 2.0**-8, 2.0**4, steps=4),
    GAUDI3: Fp8Card(E4M3_MAX[GAUDI3], 2.0**-55, 2.0**7, steps=1),
}


def _as_is(scale: torch.Tensor, card: Fp8Card) -> torch.Tensor:
    return scale


def _power_of_two(scale: torch.Tensor, card: Fp8Card) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def _hardware(scale: torch.Tensor, card: Fp8Card) -> torch.Tensor:
    steps = torch.ceil(torch.log2(_power_of_two(scale, card)) / card.steps) * card.steps
    return torch.clamp(2.0**steps, card.smallest_scale, card.largest_scale)


Rounding = Callable[[torch.Tensor, Fp8Card], torch.Tensor]


@dataclass(frozen=True)
class Method:
    activation: Rounding
    weight: Rounding
    weight_per_channel: bool = False


SCALE_METHODS = {
    "maxabs_hw": Method(_hardware, _hardware),
    "maxabs_pow2": Method(_power_of_two, _power_of_two),
    "maxabs_arbitrary": Method(_as_is, _as_is),
    "act_maxabs_hw_weights_pcs_maxabs_pow2": Method(_hardware, _power_of_two, weight_per_channel=True),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": Method(_power_of_two, _power_of_two, weight_per_channel=True),
}
"""Maps INC's names to methods. INC's `opt` methods need the weights and run on a Gaudi while it loads them."""

# Share of FP8's range that the largest measured value takes: a prompt may bring a larger activation, weights are fixed.
_ACTIVATION_SHARE, _WEIGHT_SHARE = 0.25, 0.5
_TINY = torch.finfo(_BITS).tiny


def make_scales(ranks: Sequence[Record], method: str, card: str) -> list[Record]:
    """Make the scales of all ranks from their measurements; the parts of a sharded weight share one scale."""
    maker = _Maker(SCALE_METHODS[method], CARDS[card], ranks)
    return [
        replace(
            rank,
            mode=SCALED,
            nodes={name: maker.node(name, node, rank) for name, node in rank.nodes.items()},
            device=card,
        )
        for rank in ranks
    ]


class _Maker:
    def __init__(self, method: Method, card: Fp8Card, ranks: Sequence[Record]) -> None:
        self.method = method
        self.card = card
        self.ranks = ranks

    def node(self, name: str, node: Node, measured: Record) -> Node:
        kind = name.rpartition(".")[2]
        if "weight" in node.params:
            return self._linear(name, node, measured)
        inputs = [self._activation(values) for values in node.inputs]
        outputs = [self._activation(values) for values in node.outputs]
        if kind == "softmax":
            return _stored([], outputs)
        if kind in ("k_cache", "v_cache"):
            return _stored(inputs, inputs)
        if len(inputs) == 2:
            return _stored(inputs, [inputs[0] * inputs[1]])
        raise QuantFilesError(f"{name} has {len(inputs)} inputs, for which scales cannot be made; exclude it")

    def _linear(self, name: str, node: Node, measured: Record) -> Node:
        scale = self._activation(node.inputs[0])
        # A linear layer whose output is summed over ranks is measured before and after the sum.
        own_output = [self._activation(node.outputs[0])] if len(node.outputs) > 1 else None
        if not self.method.weight_per_channel:
            largest = max(float(rank.nodes[name].params["weight"].max()) for rank in self.ranks)
            weight = self._rounded(torch.tensor(largest, dtype=_BITS), _WEIGHT_SHARE, self.method.weight)
            return _stored([scale], own_output or [weight * scale], {"weight": weight})
        by_channel = _tensor(node.params["weight"]).flatten()
        shape = measured.linears.get(name)
        if shape is None or by_channel.numel() == 1:
            raise QuantFilesError(
                f"{name} was measured per tensor, so it has no scales per channel; choose another --scale-method"
            )
        # A channel of zeros gets a scale that is not zero, since it is divided by.
        channels = torch.clamp(by_channel / (self.card.largest * _WEIGHT_SHARE), min=_TINY)
        weight = self.method.weight(channels, self.card)
        columns = torch.ones(shape.local_columns(measured.world), dtype=_BITS)
        return _stored([scale], own_output or [weight * scale], {"weight": {0: weight, 1: columns}})

    def _activation(self, values: np.ndarray) -> torch.Tensor:
        return self._rounded(_tensor(values).max(), _ACTIVATION_SHARE, self.method.activation)

    def _rounded(self, largest: torch.Tensor, share: float, rounding: Rounding) -> torch.Tensor:
        if largest == 0:  # INC would divide by zero; any scale represents zeros
            return torch.ones_like(largest)
        return rounding(largest / (self.card.largest * share), self.card)


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(_BITS)


def _stored(inputs: list[torch.Tensor], outputs: list[torch.Tensor], params: dict[str, Any] | None = None) -> Node:
    def array(scale: Any) -> Any:
        return {axis: array(s) for axis, s in scale.items()} if isinstance(scale, dict) else scale.float().numpy()

    return Node(
        inputs=[array(scale) for scale in inputs],
        outputs=[array(scale) for scale in outputs],
        params={name: array(scale) for name, scale in (params or {}).items()},
    )
