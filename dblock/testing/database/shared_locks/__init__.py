"""Read-write locks and semaphores in the database in memory."""
