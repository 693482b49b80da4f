"""The language that generated lowerings are written in: builder, tensors, dtypes, scalar operations."""
