"""Output of `make generate`; do not edit."""
