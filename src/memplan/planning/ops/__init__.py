"""Kernels that memplan registers as torch ops, and copies to host memory."""
