"""Plans in fused kernels, which Inductor makes of each half."""
