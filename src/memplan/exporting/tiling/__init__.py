"""Compute large values in groups of channels, in as many as a budget needs."""
