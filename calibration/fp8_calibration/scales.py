"""Make scales from the measurements of ranks, with the arithmetic of Intel Neural Compressor (INC).

FP8 holds x / scale. Every operation is in bfloat16, as in INC, so that a Gaudi gets the same numbers.

All ranks get the maximum of an activation over ranks, so that each has the scales of a model on one rank. Output
channels of a weight are concatenated if ranks hold different channels, and get the maximum if ranks share them. A
rank's part of a sum is dropped, since only an FP8 all-reduce, which is off, would use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from vllm_gaudi_spec.config import E4M3_MAX, GAUDI2, GAUDI3
from vllm_gaudi_spec.quantization.files import SCALED, LinearShape, Node, Part, QuantFilesError, Record

_BITS = torch.bfloat16


@dataclass(frozen=True)
class Fp8Card:
    """The range of a card's FP8, and the scales that its matrix engine applies for free."""

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

# The share of FP8's range that the largest measured value takes. Prompts may bring larger activations, unlike weights.
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
        columns = torch.ones(_count_columns(shape, measured.world), dtype=_BITS)
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


def supports_method(record: Record, method: str) -> bool:
    """Whether the weights were measured as the method needs them."""
    if not SCALE_METHODS[method].weight_per_channel:
        return True
    weights = ((name, node.params["weight"]) for name, node in record.nodes.items() if "weight" in node.params)
    return all(name in record.linears and weight.size > 1 for name, weight in weights)


# ---- one rank ------------------------------------------------------------------------------------------------

# The cache from which a matmul reads its second input. It must use the scale of that cache, since INC also measures
# padding in the input, which was never written.
_READ_FROM = {"matmul_qk": "k_cache", "matmul_av": "v_cache"}


def postprocess(record: Record, *, allow_unseen: bool = False) -> tuple[Record, list[str], list[str]]:
    """Drop modules that saw no value, and give matmuls of attention the range of the cache that they read.

    Returns:
        The new record, the matmuls that have the range of their cache, and the modules that saw no value.
    """
    names = record.looked_at
    nodes = {name: record.nodes[name] for name in names if name in record.nodes and _has_seen(record.nodes[name])}
    unseen, shared = [name for name in names if name not in nodes], []
    if not nodes or (unseen and not allow_unseen):
        raise QuantFilesError(
            f"{len(unseen)} of {len(names)} modules saw no value, including {' and '.join(unseen[:2])}; measure with "
            "more prompts, or leave them in high precision with --allow-unseen"
        )
    for name, node in nodes.items():
        parent, _, kind = name.rpartition(".")
        if (cache := nodes.get(f"{parent}.{_READ_FROM.get(kind)}")) is not None:
            nodes[name] = replace(node, inputs=[node.inputs[0], cache.inputs[0]])
            shared.append(name)
    return replace(record, nodes=nodes), shared, unseen


def _has_seen(node: Node) -> bool:
    return any(values.max() > 0 for values in [*node.inputs, *node.outputs])


# ---- ranks ---------------------------------------------------------------------------------------------------

_WEIGHT = "weight"


def merge(one: Record, other: Record) -> Record:
    """Merge two measurements of the same rank."""
    names = dict.fromkeys([*one.nodes, *other.nodes])
    nodes = {name: _largest(name, [r.nodes[name] for r in (one, other) if name in r.nodes]) for name in names}
    looked_at = list(dict.fromkeys([*one.looked_at, *other.looked_at]))
    return replace(one, nodes=nodes, looked_at=looked_at, linears=one.linears | other.linears)


def unify(ranks: Sequence[Record]) -> Record:
    """Return what a single rank would have measured, from all ranks in order."""
    first = ranks[0]
    _check_shapes(first, len(ranks))
    nodes = {}
    for name in dict.fromkeys(name for record in ranks for name in record.nodes):
        having = [record for record in ranks if name in record.nodes]
        weights = [record.nodes[name].params[_WEIGHT] for record in having if _WEIGHT in record.nodes[name].params]
        without = [replace(record.nodes[name], params={}) for record in having]
        node = _largest(name, without)
        if weights:
            if len(node.outputs) > 1 and len(ranks) > 1:
                # The outputs are a rank's own product and the sum of all; on one rank they are equal.
                node.outputs[0] = node.outputs[1]
            node.params[_WEIGHT] = _whole_weight(name, first.linears.get(name), weights, len(ranks))
        nodes[name] = node
    looked_at = list(dict.fromkeys(name for record in ranks for name in record.looked_at))
    return replace(first, rank=0, world=1, nodes=nodes, looked_at=looked_at)


def expand(whole: Record, world: int) -> list[Record]:
    """Return the measurements of each of `world` ranks, from those of a single rank."""
    _check_shapes(whole, world)
    return [
        replace(
            whole,
            rank=rank,
            world=world,
            nodes={
                name: _local(name, node, whole.linears.get(name), rank, world) for name, node in whole.nodes.items()
            },
        )
        for rank in range(world)
    ]


def _check_shapes(record: Record, world: int) -> None:
    """Refuse weights measured by channel if the record lacks how ranks share the channels."""
    for name, node in record.nodes.items() if world > 1 else ():
        if name not in record.linears and any(values.size > 1 for values in node.arrays()):
            raise QuantFilesError(
                f"{name} was measured by channel, and its file does not record how ranks share it; measure with the "
                "observer maxabs"
            )
        if name in record.linears:
            _count_columns(record.linears[name], world)


def _largest(name: str, nodes: Sequence[Node]) -> Node:
    return Node(
        inputs=_elementwise(name, [node.inputs for node in nodes]),
        outputs=_elementwise(name, [node.outputs for node in nodes]),
        params={key: _maximum(name, [node.params[key] for node in nodes]) for key in nodes[0].params},
    )


def _elementwise(name: str, tensors: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    if len({len(each) for each in tensors}) > 1:
        raise QuantFilesError(f"{name} has different numbers of tensors in files that belong together")
    return [_maximum(name, same) for same in zip(*tensors, strict=True)]


def _maximum(name: str, arrays: Iterable[np.ndarray]) -> np.ndarray:
    arrays = list(arrays)
    if len({array.shape for array in arrays}) > 1:
        raise QuantFilesError(f"{name} has different shapes in files that belong together")
    return reduce(np.maximum, arrays)


def _whole_weight(name: str, shape: LinearShape | None, weights: Sequence[np.ndarray], world: int) -> np.ndarray:
    if not _is_cut(shape, weights[0]):
        return _maximum(name, weights)
    assert shape is not None
    if len(weights) < world:
        raise QuantFilesError(f"{name} is missing on {world - len(weights)} of {world} ranks")
    parts = [_split(name, weight, _count_rows(shape, world)) for weight in weights]
    return np.concatenate(
        [
            parts[rank][index]
            for index, part in enumerate(shape.parts)
            for rank in range(0, world, world // _count_owners(part, world))
        ]
    )


def _local(name: str, node: Node, shape: LinearShape | None, rank: int, world: int) -> Node:
    weight = node.params.get(_WEIGHT)
    if weight is None or not _is_cut(shape, weight):
        return node
    assert shape is not None
    shares = []
    sizes = zip(shape.parts, _split(name, weight, _count_rows(shape, 1)), _count_rows(shape, world), strict=True)
    for part, rows, size in sizes:
        turn = rank // (world // _count_owners(part, world))
        shares.append(rows[turn * size : (turn + 1) * size])
    return replace(node, params=node.params | {_WEIGHT: np.concatenate(shares)})


def _count_owners(part: Part, world: int) -> int:
    """Return how many ranks hold different rows."""
    return min(world, part.heads) if part.heads else world


def _count_rows(shape: LinearShape, world: int) -> list[int]:
    """Return how many rows of each part a rank holds."""
    if shape.axis != "rows":
        return [part.rows for part in shape.parts]
    counts = []
    for part in shape.parts:
        owners = _count_owners(part, world)
        if part.rows % owners or world % owners or (part.heads and part.heads % owners):
            raise QuantFilesError(
                f"{part.rows} output channels in {part.heads or 1} heads cannot be divided among {world} ranks"
            )
        counts.append(part.rows // owners)
    return counts


def _count_columns(shape: LinearShape, world: int) -> int:
    """Return how many columns a rank holds."""
    if shape.axis != "columns":
        return shape.columns
    if shape.columns % world:
        raise QuantFilesError(f"{shape.columns} input channels cannot be divided among {world} ranks")
    return shape.columns // world


def _is_cut(shape: LinearShape | None, weight: np.ndarray) -> bool:
    """Whether the weight was measured by channel and ranks hold different channels."""
    return shape is not None and shape.axis == "rows" and weight.size > 1


def _split(name: str, weight: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    if sum(sizes) != len(weight):
        raise QuantFilesError(f"{name} has {len(weight)} output channels on a rank, not {sum(sizes)}")
    return np.split(weight, np.cumsum(sizes)[:-1])
