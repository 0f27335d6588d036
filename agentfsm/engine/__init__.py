"""The engine: the only place that performs the effect in `run.effect`."""
