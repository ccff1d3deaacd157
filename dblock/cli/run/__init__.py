"""A command under a lease: run, watched over, and ended with all that it has started."""
