"""Snapshots replayed."""
