"""Sweeps: a step at many points of some axes."""
