"""`dblock bench`: measure locks on your own database, and show the figures."""
