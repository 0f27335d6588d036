"""Reading journals: load, list, follow, audit and compare runs. It needs a store, and not the engine."""
