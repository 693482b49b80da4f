"""The text of kernels, in C++ and Triton."""
