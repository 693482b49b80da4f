"""The only module that imports private torch names: what each is for, and the versions it was tested on (2.11, 2.13)."""
