"""`dblock bench`: measure locks on your own database, and print the figures."""
