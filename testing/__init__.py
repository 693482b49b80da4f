"""What `opforge test` runs, and the generated tests of operators with it: operators compiled beside eager."""
