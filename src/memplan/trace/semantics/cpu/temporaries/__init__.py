"""Temporaries inside PyTorch's own CPU kernels, by kind of op."""
