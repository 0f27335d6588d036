"""THINK: build the model request, send it and read the reply."""
