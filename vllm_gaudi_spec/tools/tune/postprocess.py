"""What measurements need before scales are made of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm_gaudi_spec.quantization.files import Node, QuantFilesError, Record

# Which cache a matmul's second input is read from. The cache holds FP8 in a scale of its own, so the matmul has to use
# that one; measured by INC, the input may also have what nobody wrote: whatever stands in padding.
_READ_FROM = {"matmul_qk": "k_cache", "matmul_av": "v_cache"}


@dataclass
class Notes:
    """What was done to a record."""

    shared: list[str] = field(default_factory=list)
    """Matmuls that got the range of their cache."""
    unseen: list[str] = field(default_factory=list)
    """Modules without a value, which stay in high precision."""


def postprocess(record: Record, *, allow_unseen: bool = False) -> tuple[Record, Notes]:
    notes = Notes()
    names = record.looked_at
    nodes = {name: record.nodes[name] for name in names if name in record.nodes and _has_seen(record.nodes[name])}
    notes.unseen = [name for name in names if name not in nodes]
    if not nodes or (notes.unseen and not allow_unseen):
        raise QuantFilesError(
            f"{len(notes.unseen)} of {len(names)} modules saw no value, {' and '.join(notes.unseen[:2])} among them: "
            "measure with more prompts, or leave them in high precision with --allow-unseen"
        )
    for name, node in nodes.items():
        parent, _, kind = name.rpartition(".")
        cache = nodes.get(f"{parent}.{_READ_FROM.get(kind)}")
        if cache is not None:
            nodes[name] = replace(node, inputs=[node.inputs[0], cache.inputs[0]])
            notes.shared.append(name)
    return replace(record, nodes=nodes), notes


def _has_seen(node: Node) -> bool:
    return any(values.max() > 0 for values in [*node.inputs, *node.outputs])
