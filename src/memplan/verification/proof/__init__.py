"""Prove that a candidate step gives the results of a reference."""
