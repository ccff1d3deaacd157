"""The protocol as a model: see README.md."""
