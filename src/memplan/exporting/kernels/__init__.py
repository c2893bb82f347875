"""C kernels and the calls that are written for each operation."""
