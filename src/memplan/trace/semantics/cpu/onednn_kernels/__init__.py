"""Kernels of oneDNN whose blocks come from its own estimates of the time."""
