"""The HTTP API: routes, typed requests, error responses, connection limits. It has no SQL and no device code."""
