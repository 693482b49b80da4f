"""Functions of the program that a higher-order operator runs: branches, the body of a loop, the step of a scan."""
