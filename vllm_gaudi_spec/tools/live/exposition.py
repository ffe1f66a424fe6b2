"""What a server's /metrics holds, by Prometheus' own parser of its text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class NotMetrics(ValueError):
    """The text is in another format."""


class Reading:
    """All samples of one moment."""

    def __init__(self, text: str, at: float) -> None:
        """`at`: seconds on any clock that all readings share."""
        self.at = at
        self._samples: dict[str, list[Sample]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append(sample)
        except ValueError as error:
            raise NotMetrics(" ".join(str(error).split())[:80]) from None

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
