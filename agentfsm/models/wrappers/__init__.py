"""Models that wrap other models: fallback, routing, throttling."""
