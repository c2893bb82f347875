"""Exact rewrites of the joint graph: a file for each."""
