"""The HTTP API under /v1: one module per thing, and one table of operations that routing and OpenAPI share."""
