"""What a robustness run has recorded, and the sequential models that it is compared with."""
