"""Compiled autograd: the autograd engine's backward, captured as one graph."""
