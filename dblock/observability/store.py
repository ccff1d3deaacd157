"""The values of metrics in this process: counters, histograms, gauges, and the groups that bound the number of series.

Guarantee: values are exact under any number of threads. `dblock.observability.catalogue` bounds the number of series.
This module depends on no metrics library. The module `prometheus` hands the values to prometheus_client, and `render()`
writes them as text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dblock.observability.catalogue import GROUP_LENGTH, MAX_GROUPS, OTHER, Metric


class Sample(NamedTuple):
    """One series and its value."""

    name: str
    labels: dict[str, str]
    value: float


class Family(NamedTuple):
    """A metric with all its series."""

    metric: Metric
    samples: list[Sample]


class Groups:
    """The groups that keep their names: the first hundred that were seen."""

    def __init__(self, most: int = MAX_GROUPS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}

    @property
    def known(self) -> list[str]:
        """The groups that were seen so far."""
        return list(self._known)

    def of(self, name: str) -> str:
        """Return the group of a lock or of a resource."""
        return self.admit(name.partition(":")[0][:GROUP_LENGTH])

    def admit(self, group: str) -> str:
        """Return the group, or `other` if there are too many."""
        if group in self._known:
            return group
        with self._lock:
            if not group or (len(self._known) >= self._most and group not in self._known):
                return OTHER
            self._known[group] = None
        return group


class Histogram:
    """How often a value was below each bound, for each combination of labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Count a value. The last label is the group, if there are labels."""
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                if labels and len(self._series) >= self._metric.label_sets:
                    labels = (*labels[:-1], OTHER)
                series = self._series.setdefault(labels, ([0] * (len(self._metric.buckets) + 1), [0.0]))
            counts, total = series
            counts[bisect_left(self._metric.buckets, value)] += 1
            total[0] += value

    def family(self) -> Family:
        """Return the values as they are now, with cumulative buckets."""
        with self._lock:
            copied = [(labels, list(counts), total[0]) for labels, (counts, total) in self._series.items()]
        name = self._metric.name
        samples = []
        for labels, counts, total in copied:
            named = dict(zip(self._metric.labels, labels, strict=True))
            so_far = 0
            for bound, count in zip([*map(str, self._metric.buckets), "+Inf"], counts, strict=True):
                so_far += count
                samples.append(Sample(f"{name}_bucket", {**named, "le": bound}, so_far))
            samples += [Sample(f"{name}_sum", named, total), Sample(f"{name}_count", named, so_far)]
        return Family(self._metric, samples)


class Counter:
    """How often something happened, for each combination of labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], int] = {} if metric.labels else {(): 0}

    def add(self, *labels: str) -> None:
        """Count once more."""
        with self._lock:
            self._series[labels] = self._series.get(labels, 0) + 1

    def family(self) -> Family:
        """Return the values as they are now."""
        with self._lock:
            copied = list(self._series.items())
        return family(self._metric, copied)


def family(metric: Metric, series: Iterable[tuple[Sequence[str], float]]) -> Family:
    """Return a family of a counter or a gauge with these series, each given by its labels and its value."""
    return Family(
        metric, [Sample(metric.name, dict(zip(metric.labels, labels, strict=True)), value) for labels, value in series]
    )


def render(families: Iterable[Family]) -> str:
    """Return the text that Prometheus reads, in the format 0.0.4."""
    return "".join(_lines(families))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _lines(families: Iterable[Family]) -> Iterator[str]:
    for metric, samples in families:
        yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
        for name, labels, value in samples:
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            yield f"{name}{{{shown}}} {value!r}\n" if shown else f"{name} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
