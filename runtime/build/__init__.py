"""Compilers of C++ and Triton kernels, and the on-disk cache."""
