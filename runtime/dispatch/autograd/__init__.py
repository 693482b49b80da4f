"""Gradients of the traced program, its tangents in forward mode, and the order of its hooks."""
