"""The Python that runs around the compiled graph at each call."""
