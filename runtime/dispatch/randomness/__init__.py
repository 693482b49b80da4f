"""Random operators as functions of a seed, a stream and a position."""
