"""Metrics and traces of a client: observers that it tells of its waits, holds and renewals.

client = dblock.Client(dsn, observers=[PrometheusObserver(), OpenTelemetryObserver()])

`prometheus` and `opentelemetry` hold the two observers, each with an extra of its own name. To write another one,
derive it from `Observer`. An observer changes nothing that the client does, and an error of an observer is only logged.
A client without observers does not even import this package.
"""

from dblock._core.observation import OUTCOMES, ObservedHold, ObservedWait, Observer

__all__ = ["OUTCOMES", "ObservedHold", "ObservedWait", "Observer"]
