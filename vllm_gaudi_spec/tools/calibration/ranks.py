"""Combine the measurements of tensor-parallel ranks, and split them for another number of ranks.

An activation gets the maximum over all ranks, so that every rank has the scales of a model on one rank. Output channels
of a weight are concatenated where ranks hold different channels, and get the maximum where ranks share them. A rank's
part of a sum is dropped, since only an FP8 all-reduce, which is off, would be scaled by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from vllm_gaudi_spec.quantization.files import LinearShape, Node, QuantFilesError, Record

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
            record.linears[name].local_columns(world)


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
    parts = [_split(name, weight, shape.local_parts(world)) for weight in weights]
    return np.concatenate(
        [
            parts[rank][index]
            for index, part in enumerate(shape.parts)
            for rank in range(0, world, world // part.owners(world))
        ]
    )


def _local(name: str, node: Node, shape: LinearShape | None, rank: int, world: int) -> Node:
    weight = node.params.get(_WEIGHT)
    if weight is None or not _is_cut(shape, weight):
        return node
    assert shape is not None
    shares = []
    sizes = zip(shape.parts, _split(name, weight, shape.local_parts(1)), shape.local_parts(world), strict=True)
    for part, rows, size in sizes:
        turn = rank // (world // part.owners(world))
        shares.append(rows[turn * size : (turn + 1) * size])
    return replace(node, params=node.params | {_WEIGHT: np.concatenate(shares)})


def _is_cut(shape: LinearShape | None, weight: np.ndarray) -> bool:
    """Whether the weight was measured by channel and ranks hold different channels."""
    return shape is not None and shape.axis == "rows" and weight.size > 1


def _split(name: str, weight: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    if sum(sizes) != len(weight):
        raise QuantFilesError(f"{name} has {len(weight)} output channels on a rank, not {sum(sizes)}")
    return np.split(weight, np.cumsum(sizes)[:-1])
