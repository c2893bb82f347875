"""Costs of ops: seconds and workspaces."""
