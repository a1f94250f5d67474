"""What the router serves, told to machines: ``GET /openapi.json``."""
