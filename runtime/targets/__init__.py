"""What is done for a processor or a GPU from a program to loaded kernels, and the measurements of max_autotune."""
