"""Layouts of a module over several cards."""
