"""Reductions rewritten for a GPU before scheduling: in parts, or written out."""
