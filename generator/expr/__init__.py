"""The typed expression language of the specs: parse, check, print."""
