"""From the user's program to a functional graph without aliases, and the Python wrapper that gives the program its effects back."""
