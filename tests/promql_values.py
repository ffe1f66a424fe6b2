"""What an expression comes to over given samples: of PromQL what docs/alerts.yaml compares acceptance with."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import promql_parser as promql

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Series = Mapping[tuple[str, Labels], list[tuple[float, float]]]
"""By name and labels: (second, value), in the order of time."""

ARITHMETIC: dict[str, Callable[[float, float], float]] = {"*": operator.mul, "/": operator.truediv}
COMPARISON: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}


def value_of(expression: str, series: Series, at: float) -> Vector:
    found = _value(promql.parse(expression), series, at)
    assert isinstance(found, dict)
    return found


def _value(node: Any, series: Series, at: float) -> Vector | float:
    match node:
        case promql.NumberLiteral():
            return float(node.val)
        case promql.ParenExpr():
            return _value(node.expr, series, at)
        case promql.Call() if node.func.name == "increase":
            return _increase(node.args[0], series, at)
        case promql.AggregateExpr() if str(node.op) == "sum":
            assert node.modifier is not None
            kept = set(node.modifier.labels)
            sums: Vector = {}
            for labels, value in _vector(node.expr, series, at).items():
                group = frozenset(label for label in labels if label[0] in kept)
                sums[group] = sums.get(group, 0.0) + value
            return sums
        case promql.BinaryExpr():
            return _binary(node, _value(node.lhs, series, at), _value(node.rhs, series, at))
    raise AssertionError(f"not known here: {type(node).__name__} {node}")


def _vector(node: Any, series: Series, at: float) -> Vector:
    found = _value(node, series, at)
    assert isinstance(found, dict)
    return found


def _increase(node: Any, series: Series, at: float) -> Vector:
    """Between samples of the window, without Prometheus' extrapolation to its ends. A counter that falls was reset."""
    selector = node.vector_selector
    assert not selector.matchers.matchers
    end = at - (selector.offset.total_seconds() if selector.offset else 0.0)
    found: Vector = {}
    for (name, labels), samples in series.items():
        values = [value for second, value in samples if end - node.range.total_seconds() <= second <= end]
        if name == selector.name and len(values) > 1:
            pairs = itertools.pairwise(values)
            found[labels] = sum(after - before if after >= before else after for before, after in pairs)
    return found


def _binary(node: Any, left: Vector | float, right: Vector | float) -> Vector:
    on = node.modifier and node.modifier.matching and set(node.modifier.matching.labels)

    def key(labels: Labels) -> Labels:
        return labels if on is None else frozenset(label for label in labels if label[0] in on)

    symbol = str(node.op)
    if isinstance(left, float):
        assert isinstance(right, dict)
        return {labels: ARITHMETIC[symbol](left, value) for labels, value in right.items()}
    if isinstance(right, float):
        pairs = {labels: (value, right) for labels, value in left.items()}
    else:
        pairs = {labels: (value, right[key(labels)]) for labels, value in left.items() if key(labels) in right}
    if symbol in ARITHMETIC:
        return {labels: ARITHMETIC[symbol](*pair) for labels, pair in pairs.items() if pair[1]}
    return {labels: pair[0] for labels, pair in pairs.items() if symbol == "and" or COMPARISON[symbol](*pair)}
