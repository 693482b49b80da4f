"""What tracing must know of an operator: its schema, its effects, and where torch's fake kernels are wrong."""
