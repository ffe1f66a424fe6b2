"""Quantization measurements of a fictitious model: two Llama layers with four heads and two KV heads."""

import numpy as np

from vllm_gaudi_spec.quantization.files import MEASURED, LinearShape, Node, Part, Record

HEADS, KV_HEADS, HEAD, HIDDEN, INNER = 4, 2, 8, 32, 48
SHAPES = {
    "self_attn.qkv_proj": LinearShape(
        "rows", (Part(HEADS * HEAD, HEADS), Part(KV_HEADS * HEAD, KV_HEADS), Part(KV_HEADS * HEAD, KV_HEADS)), HIDDEN
    ),
    "self_attn.o_proj": LinearShape("columns", (Part(HIDDEN),), HEADS * HEAD),
    "mlp.gate_up_proj": LinearShape("rows", (Part(INNER), Part(INNER)), HIDDEN),
    "mlp.down_proj": LinearShape("columns", (Part(HIDDEN),), INNER),
}
MODEL = "0123456789abcdef"


def measured(seed: int = 0, model: str = MODEL) -> Record:
    rng = np.random.default_rng(seed)

    def largest(rows: int = 1) -> np.ndarray:
        return np.exp(rng.normal(size=(rows, 1)) * 2).astype(np.float32)

    nodes, linears = {}, {}
    for layer in ("model.layers.0", "model.layers.1"):
        for name, shape in SHAPES.items():
            summed = [largest()] * 2 if shape.axis == "columns" else []
            weight = largest(sum(part.rows for part in shape.parts))
            nodes[f"{layer}.{name}"] = Node([largest()], summed, {"weight": weight})
            linears[f"{layer}.{name}"] = shape
        attention = f"{layer}.self_attn.attn.impl"
        keys, values = largest(), largest()
        nodes[f"{attention}.k_cache"] = Node([keys])
        nodes[f"{attention}.v_cache"] = Node([values])
        nodes[f"{attention}.matmul_qk"] = Node([largest(), keys])
        nodes[f"{attention}.matmul_av"] = Node([largest(), values])
        nodes[f"{attention}.softmax"] = Node([largest()], [largest()])
    return Record(0, 1, MEASURED, nodes, list(nodes), model, linears)


def same(one: Record, other: Record) -> None:
    assert one.nodes.keys() == other.nodes.keys()
    for name, node in one.nodes.items():
        theirs = other.nodes[name]
        for ours, others in ((node.inputs, theirs.inputs), (node.outputs, theirs.outputs)):
            assert len(ours) == len(others), name
            for a, b in zip(ours, others, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
        assert node.params.keys() == theirs.params.keys(), name
        for key, value in node.params.items():
            np.testing.assert_equal(value, theirs.params[key], err_msg=name)
