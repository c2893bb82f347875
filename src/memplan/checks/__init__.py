"""Checks of a recorded step for memory traps, a module each: Trace -> Findings."""
