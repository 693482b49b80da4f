"""The engine: from a graph that Dynamo captured to a function that runs it. It names no operator and reads no YAML."""
