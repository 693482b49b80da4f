"""Texts of what is compiled for a fixed set of programs and machines, and the comparison of two commits by them."""
