"""Comparison of two steps."""
