"""Which tensors share memory: regions, views, overlap, and inputs that must not meet."""
