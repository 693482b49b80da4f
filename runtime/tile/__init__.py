"""How a kernel runs: its family, blocks, launch, what stays in registers, and what a GPU can run at all."""
