"""`dblock certify`: what is guaranteed on this database, by trying it."""
