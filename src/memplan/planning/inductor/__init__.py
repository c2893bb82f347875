"""Plans in fused kernels, which Inductor generates for each pass."""
