"""The HTTP API under /v1: one module for locks, one for leases and tickets, one for Terraform's protocol.

Routing and the OpenAPI document share one table of operations.
"""
