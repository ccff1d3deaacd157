"""Metrics and traces of a client: observers to which it reports its waits, holds and renewals.

client = dblock.Client(dsn, observers=[PrometheusObserver(), OpenTelemetryObserver()])

The modules `prometheus` and `opentelemetry` have the two observers. Each needs the extra of the same name. To write
another one, derive it from `Observer`. An observer changes nothing that the client does, and the client only logs its
errors. A client without observers does not import this package.
"""

from dblock._core.observation import OUTCOMES, ObservedHold, ObservedWait, Observer

__all__ = ["OUTCOMES", "ObservedHold", "ObservedWait", "Observer"]
