"""What the processes of a robustness run do, and on which stage: workers, workloads, resources, interruptions."""
