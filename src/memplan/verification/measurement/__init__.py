"""Peaks and seconds of steps that really run."""
