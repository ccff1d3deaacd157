"""`dblock run`: run a command under a lease, and end it with all its processes before the lease ends."""
