"""CUDA graphs: which calls are recorded and replayed, and the memory that recordings share."""
