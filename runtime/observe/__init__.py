"""What is said about a compilation: counts, times, progress, logs and dumped files."""
