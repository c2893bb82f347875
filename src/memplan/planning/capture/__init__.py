"""Capture of a model's call as a joint graph."""
