"""The HTTP API: routes, typed requests, error responses, limits of connections. Knows no SQL and no device."""
