"""From the functional graph to a program of the loop IR: each node by its lowering or as a library call."""
