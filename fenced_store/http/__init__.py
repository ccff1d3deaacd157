"""HTTP services that refuse a stale fencing token, and clients that send one."""
