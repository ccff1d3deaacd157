"""`dblock watch`: poll the locks and show what changes, on a live screen or as a stream of lines."""
