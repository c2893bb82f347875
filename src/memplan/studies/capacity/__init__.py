"""The largest value that fits."""
