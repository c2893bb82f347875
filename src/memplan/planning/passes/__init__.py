"""Exact rewrites of the joint graph, one file each."""
