"""The order of steps, writes into inputs, and where each buffer lives."""
