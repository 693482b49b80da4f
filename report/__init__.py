"""What was compiled, for readers: the summary, the data and the page of `opforge.explain`."""
