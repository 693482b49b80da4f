"""The host program: what the processor does, in order, to run a plan; verified as data and written as Python."""
