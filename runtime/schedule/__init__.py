"""From a program of the loop IR to a plan: the list of passes, which calls on fuse, tile and memory."""
