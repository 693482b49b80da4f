"""The loop IR: scalar expressions, integer index expressions, loop nests and calls of libraries; its text form and its verifier."""
