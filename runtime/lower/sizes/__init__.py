"""Symbolic sizes in a program: their expressions, equalities, and those that only data tells."""
