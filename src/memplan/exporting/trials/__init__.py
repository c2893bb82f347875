"""Compile and run an export, and compare it with PyTorch."""
