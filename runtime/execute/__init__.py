"""What runs when a graph is called, beneath the code that was written for it: memory, launches, loading, ranges of a profiler."""
