"""Whole runs of a script: their phases, and what these take at their ends."""
