"""Evaluate the part of PromQL that examples/observability uses, on scraped samples."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import promql_parser as promql
from prometheus_client import CollectorRegistry

#: Labels in order, without the metric's name.
Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
#: The samples of one scrape, by the metric's name.
Samples = dict[str, Vector]

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "Equal": operator.eq,
    "NotEqual": operator.ne,
    "Re": lambda value, text: re.fullmatch(text, value) is not None,
    "NotRe": lambda value, text: re.fullmatch(text, value) is None,
}


def nodes(node: Any) -> Iterator[Any]:
    """Yield every part of a parsed query."""
    yield node
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in (*children, *(getattr(node, "args", None) or ())):
        if child is not None:
            yield from nodes(child)


parse = lru_cache(promql.parse)


class Series:
    """Scrapes of one registry, and queries at the time of the last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._scrapes: list[tuple[float, Samples]] = []

    def scrape(self, now: float) -> None:
        """Collect all samples at a time in seconds."""
        found: Samples = {}
        for family in self._registry.collect():
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
        self._scrapes.append((now, found))

    def query(self, query: str) -> Vector:
        found = self._value(parse(query))
        assert isinstance(found, dict)
        return found

    def _value(self, node: Any) -> Vector | float:
        match node:
            case promql.NumberLiteral():
                return float(node.val)
            case promql.ParenExpr():
                return self._value(node.expr)
            case promql.VectorSelector():
                return _selected(node, self._scrapes[-1][1])
            case promql.Call():
                return self._called(node)
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.BinaryExpr():
                return self._combined(node)
        raise NotImplementedError(node)

    def _called(self, node: promql.Call) -> Vector:
        if node.func.name == "histogram_quantile":
            quantile, buckets = map(self._value, node.args)
            assert isinstance(quantile, float)
            assert isinstance(buckets, dict)
            return _quantiles(quantile, buckets)
        (matrix,) = node.args
        return self._increase(matrix, per_second={"rate": True, "increase": False}[node.func.name])

    def _increase(self, matrix: promql.MatrixSelector, *, per_second: bool) -> Vector:
        """Return the increase from the range's first sample to its last, not extrapolated."""
        now, last = self._scrapes[-1]
        begin, name = now - matrix.range.total_seconds(), matrix.vector_selector.name
        found = {}
        for labels, value in _selected(matrix.vector_selector, last).items():
            time, first = next(
                (time, samples[name][labels])
                for time, samples in self._scrapes
                if time >= begin and labels in samples.get(name, ())
            )
            if time < now:
                seconds = now - time if per_second else 1.0
                found[labels] = (value - first) / seconds
        return found

    def _aggregated(self, node: promql.AggregateExpr) -> Vector:
        merge = {"sum": sum, "max": max, "min": min}[str(node.op)]
        values = self._value(node.expr)
        assert isinstance(values, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, value in values.items():
            groups.setdefault(_kept(labels, node.modifier), []).append(value)
        return {labels: merge(group) for labels, group in groups.items()}

    def _combined(self, node: promql.BinaryExpr) -> Vector:
        left, right, op = self._value(node.lhs), self._value(node.rhs), str(node.op)
        assert isinstance(left, dict)
        if isinstance(right, float):
            return {
                labels: value for labels, value in left.items() if COMPARISONS[op](value, right)
            }
        if op == "or":
            return {**right, **left}
        matching = node.modifier.matching if node.modifier else None
        others = {_kept(labels, matching): value for labels, value in right.items()}
        pairs = {labels: _kept(labels, matching) for labels in left}
        if op in {"and", "unless"}:
            return {
                labels: left[labels] for labels, key in pairs.items()
                if (key in others) == (op == "and")
            }  # fmt: skip
        compute = ARITHMETIC.get(op, lambda a, b: a / b if b else math.nan)
        return {
            key: compute(left[labels], others[key])
            for labels, key in pairs.items()
            if key in others
        }


def _selected(selector: promql.VectorSelector, samples: Samples) -> Vector:
    def is_selected(labels: Labels) -> bool:
        values = dict(labels)
        return all(
            MATCHES[str(one.op).removeprefix("MatchOp.")](values.get(one.name, ""), one.value)
            for one in selector.matchers.matchers
        )

    found = samples.get(selector.name, {})
    return {labels: value for labels, value in found.items() if is_selected(labels)}


def _without(labels: Labels, names: Iterable[str]) -> Labels:
    return tuple(label for label in labels if label[0] not in names)


def _kept(labels: Labels, modifier: promql.LabelModifier | None) -> Labels:
    if modifier is None:  # of a binary operation: all labels count
        return labels
    if modifier.type == promql.LabelModifierType.Exclude or (
        modifier.type == promql.AggModifierType.Without
    ):
        return _without(labels, modifier.labels)
    return tuple(label for label in labels if label[0] in modifier.labels)


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """Return, for each histogram, the upper bound of the bucket with the quantile."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        groups.setdefault(_without(labels, {"le"}), []).append((bound, count))
    found = {}
    for labels, group in groups.items():
        group.sort()
        wanted = quantile * group[-1][1]
        if wanted:
            found[labels] = next(bound for bound, count in group if count >= wanted)
    return found
