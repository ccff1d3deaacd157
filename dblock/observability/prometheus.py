"""Metrics for prometheus_client: what this process does, and what the database knows of all processes.

from dblock.observability.prometheus import DatabaseCollector, PrometheusObserver

client = dblock.Client(dsn, observers=[PrometheusObserver()])   # in every process
DatabaseCollector(dsn)                                          # in one process, or let `dblock serve` do it

Both register with the default registry of prometheus_client unless you name another. Needs the extra `prometheus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dblock._core.schema_version import DEFAULT_SCHEMA
from dblock.observability.database import DatabaseMetrics
from dblock.observability.metrics import MetricsObserver
from dblock.observability.store import Family

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "dblock.observability.prometheus needs prometheus_client: pip install 'prometheus-client>=0.20'"
    ) from error

if TYPE_CHECKING:
    from dblock._runtime.target import Target, Where

__all__ = ["DatabaseCollector", "PrometheusObserver"]


class PrometheusObserver(MetricsObserver, Collector):
    """Counts what its clients do, for prometheus_client. One is enough for a process, shared by all its clients."""

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        """Register the observer with this registry. With None, nothing is registered: do that yourself."""
        super().__init__()
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the values for prometheus_client."""
        return converted(self.families())

    def describe(self) -> Iterable[Metric]:
        """Return the metrics, as a registration needs them to find names that are used twice."""
        return converted(self.families())


class DatabaseCollector(DatabaseMetrics, Collector):
    """Queries the database at each scrape for what is held and awaited. One collector for each database is enough.

    If every process had a collector, each lock would be counted once for each process.
    """

    def __init__(
        self,
        where: Where | Target = None,
        *,
        schema: str = DEFAULT_SCHEMA,
        registry: CollectorRegistry | None = REGISTRY,
    ) -> None:
        """Name the database, as for a Client. Nothing is opened before the first scrape."""
        super().__init__(where, schema=schema)
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Query the database, and return the values for prometheus_client."""
        return converted(self.families())

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registration does not query the database."""
        return []


def converted(families: Iterable[Family]) -> Iterator[Metric]:
    """Return families as prometheus_client has them."""
    for metric, samples in families:
        # prometheus_client removes the ending of a counter's name, and adds it when it writes the text.
        made = Metric(metric.name.removesuffix("_total"), metric.help, metric.kind)
        for sample in samples:
            made.add_sample(sample.name, sample.labels, sample.value)
        yield made
