"""Explanation -> something to read: one file an output."""
