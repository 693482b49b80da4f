"""What the traced program did to its inputs, and what its outputs are."""
