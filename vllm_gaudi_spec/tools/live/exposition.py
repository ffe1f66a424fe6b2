"""What a server's /metrics holds: Prometheus' text format, as far as servers write it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {r"\n": "\n", r"\"": '"', r"\\": "\\"}


class NotMetrics(ValueError):
    """The text is in another format."""


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Reading:
    """All samples of one moment."""

    def __init__(self, text: str, at: float) -> None:
        """`at`: seconds on any clock that all readings share."""
        self.at = at
        self._samples: dict[str, list[Sample]] = {}
        for name, sample in _samples(text):
            self._samples.setdefault(name, []).append(sample)

    def has(self, name: str) -> bool:
        return name in self._samples

    def names(self) -> list[str]:
        return list(self._samples)

    def sum(self, name: str) -> float:
        """Over all engines and labels; 0 where there is none."""
        return sum(sample.value for sample in self._samples.get(name, ()))

    def highest(self, name: str) -> float:
        return max((sample.value for sample in self._samples.get(name, ())), default=0.0)

    def by(self, label: str, name: str) -> dict[str, float]:
        """Sums over all other labels, in the order of the text."""
        found: dict[str, float] = {}
        for sample in self._samples.get(name, ()):
            if (value := sample.labels.get(label)) is not None:
                found[value] = found.get(value, 0.0) + sample.value
        return found


def _samples(text: str) -> Iterator[tuple[str, Sample]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if (found := _SAMPLE.fullmatch(line.strip())) is None:
            raise NotMetrics(f"line {number} is no sample: {line[:60]!r}")
        try:
            yield found[1], Sample(_labels(found[2] or ""), float(found[3]))
        except ValueError:
            raise NotMetrics(f"line {number} is no sample: {line[:60]!r}") from None


def _labels(text: str) -> dict[str, str]:
    found, position = {}, 0
    while position < len(text):
        label = _LABEL.match(text, position)
        if label is None:
            raise ValueError(text)
        found[label[1]] = re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), label[2])
        position = label.end()
    return found
