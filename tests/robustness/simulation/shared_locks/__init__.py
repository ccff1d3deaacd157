"""Read-write locks and semaphores in the simulated world."""
