"""`dblock elect` and `dblock leader`."""
