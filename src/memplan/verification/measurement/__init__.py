"""Measure peaks and seconds of steps that really run."""
