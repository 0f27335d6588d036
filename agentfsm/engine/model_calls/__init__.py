"""THINK: what the model is shown and told of, and asking it."""
