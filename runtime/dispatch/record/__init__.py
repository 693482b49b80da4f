"""The recorder, and the functional graph that it writes."""
