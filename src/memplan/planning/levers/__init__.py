"""Levers, the techniques to use less memory: one file each."""
