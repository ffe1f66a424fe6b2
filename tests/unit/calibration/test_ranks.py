"""Measurements of ranks: put together they are those of one rank, channel by channel."""

from dataclasses import replace

import numpy as np
import pytest

from fp8_calibration.scales import SCALE_METHODS, expand, make_scales, unify
from tests.support.measurements import HEAD, HEADS, INNER, KV_HEADS, measured, same
from vllm_gaudi_spec.quantization.files import Node, QuantFilesError, Record

QKV, GATE_UP, O_PROJ = (
    f"model.layers.0.{name}" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj")
)


def as_ranks_measure(whole: Record, world: int) -> list[Record]:
    """Written out by hand for this model: every rank sees its own heads, and all ranks together what one would."""
    ranks = []
    for rank in range(world):
        nodes = {}
        for name, node in whole.nodes.items():
            # The rank that saw the largest value is another one for each tensor.
            lucky = sum(map(ord, name)) % world
            seen = 1.0 if rank == lucky or name.endswith(("qkv_proj", "gate_up_proj")) else 0.5
            params = dict(node.params)
            if name.endswith("qkv_proj"):
                heads = node.params["weight"].reshape(-1, HEAD)
                q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS])
                mine = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
                kv = slice(rank * KV_HEADS // world, rank * KV_HEADS // world + max(1, KV_HEADS // world))
                params["weight"] = np.concatenate([q[mine], k[kv], v[kv]]).reshape(-1, 1)
            elif name.endswith("gate_up_proj"):
                gate, up = np.split(node.params["weight"], 2)
                mine = slice(rank * INNER // world, (rank + 1) * INNER // world)
                params["weight"] = np.concatenate([gate[mine], up[mine]])
            elif params:
                params["weight"] = params["weight"] * np.float32(seen)
            inputs, outputs = ([values * np.float32(seen) for values in each] for each in (node.inputs, node.outputs))
            if params and outputs and world > 1:  # its part of a sum, and the sum
                outputs = [node.outputs[0] / np.float32(world + rank), node.outputs[1]]
            nodes[name] = Node(inputs, outputs, params)
        ranks.append(replace(whole, rank=rank, world=world, nodes=nodes))
    return ranks


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_put_together_are_one_rank(world: int) -> None:
    """Four ranks share two heads of keys: each is there twice."""
    whole = measured()
    unified = unify(as_ranks_measure(whole, world))
    assert (unified.rank, unified.world) == (0, 1)
    same(unified, whole)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_spread_and_put_together_again(world: int) -> None:
    whole = measured()
    ranks = expand(whole, world)
    assert [(record.rank, record.world) for record in ranks] == [(rank, world) for rank in range(world)]
    same(unify(ranks), whole)
    for ours, theirs in zip(ranks, as_ranks_measure(whole, world), strict=True):
        for name in (QKV, GATE_UP):
            np.testing.assert_array_equal(ours.nodes[name].params["weight"], theirs.nodes[name].params["weight"])


@pytest.mark.parametrize("method", SCALE_METHODS)
def test_two_ranks_have_the_scales_of_one(method: str) -> None:
    whole = measured()
    (one,) = make_scales([whole], method, "gaudi2")
    two = make_scales(expand(unify(as_ranks_measure(whole, 2)), 2), method, "gaudi2")
    for record in two:
        for name, node in record.nodes.items():
            assert node.inputs == one.nodes[name].inputs, name
    if SCALE_METHODS[method].weight_per_channel:
        cut = [record.nodes[GATE_UP].params["weight"][0] for record in two]
        gate, up = np.split(one.nodes[GATE_UP].params["weight"][0], 2)
        halves = [np.split(channels, 2) for channels in cut]
        np.testing.assert_array_equal(np.concatenate([halves[0][0], halves[1][0]]), gate)
        np.testing.assert_array_equal(np.concatenate([halves[0][1], halves[1][1]]), up)
        assert [len(record.nodes[O_PROJ].params["weight"][1]) for record in two] == [HEADS * HEAD // 2] * 2
    else:
        assert all(record.nodes[GATE_UP].params == one.nodes[GATE_UP].params for record in two)


def test_what_does_not_fit_together_is_refused() -> None:
    ranks = as_ranks_measure(measured(), 2)
    del ranks[1].nodes[QKV]
    with pytest.raises(QuantFilesError, match="qkv_proj is missing on 1 of 2 ranks"):
        unify(ranks)
    ranks = as_ranks_measure(measured(), 2)
    ranks[1].nodes[QKV].params["weight"] = np.ones((7, 1), dtype=np.float32)
    with pytest.raises(QuantFilesError, match="qkv_proj has 7 output channels on a rank, not 32"):
        unify(ranks)
    with pytest.raises(QuantFilesError, match="cannot be divided among 3 ranks"):
        expand(measured(), 3)


def test_channels_with_an_unknown_split_are_refused() -> None:
    ranks = [replace(record, linears={}) for record in as_ranks_measure(measured(), 2)]
    with pytest.raises(QuantFilesError, match="measured by channel, and its file does not record how ranks share it"):
        unify(ranks)
    with pytest.raises(QuantFilesError, match="measured by channel, and its file does not record how ranks share it"):
        expand(replace(measured(), linears={}), 2)
    same(expand(replace(measured(), linears={}), 1)[0], measured())
