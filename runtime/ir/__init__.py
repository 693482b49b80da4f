"""The loop IR: scalar and index expressions, loop nests, library calls; its text form and its verifier."""
