"""memplan's own kernels."""
