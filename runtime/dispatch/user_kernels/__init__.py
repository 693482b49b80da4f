"""Triton kernels that the program itself launches."""
