"""`dblock serve`: the HTTP API and the dashboard, on top of the client and of `dblock.admin`.

The server keeps no state. Every request is one of the SQL functions, so you can stop a server and start another while
leases are held.

The server has not landed yet.
"""
