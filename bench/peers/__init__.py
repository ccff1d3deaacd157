"""Adapters of the compared libraries, one file each, and the floors: the sketch and pgbench."""
