"""Metrics, traces and structured log events of a client: hooks that the runtime calls.

prometheus_client and OpenTelemetry are extras, imported only here. While no hook is installed, an acquire and release
pair pays for one comparison.

No hook has landed yet.
"""
