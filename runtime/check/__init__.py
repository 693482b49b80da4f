"""The plan checker: an independent proof that a plan computes its program."""
