"""Dry runs: a step in a process with the emulated card, and torch's memory history of it as a Trace."""
