"""Generate the traffic of a robustness run: environment, workers, workloads, resources, interruptions."""
