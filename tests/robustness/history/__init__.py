"""Record the history of a robustness run, and define the sequential model that it is compared with."""
