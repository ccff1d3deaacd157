"""`dblock serve`: the HTTP API and the dashboard, on top of the flows of a client and of the SQL functions.

Guarantee: the server keeps no state that a client relies on. A lease and a ticket are rows of the database, and their
IDs work at every server of the same installation. So you can kill a server and start another while leases are held.
The server renews no lease by itself: a lease lasts for its ttl unless the HTTP client renews it.

The database decides about grants, deadlines and positions in the queue. The privileges of the role that the server
connects with limit what any caller may do. This process decides only who its caller is (`access`). If the database does
not reply, the reply to every request that needs the database is 503.
"""
