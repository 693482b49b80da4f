"""Rewrites of the functional graph by the rules of the specs."""
