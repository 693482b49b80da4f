"""Which nests and steps become one kernel, what is computed again instead of stored, and how inner values are laid out."""
