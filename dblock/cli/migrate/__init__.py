"""`dblock migrate` and `dblock migrations`: run a migration from every replica, and show what became of it."""
