"""Trace -> Timeline: bytes over time."""
