"""Compute large values a few channels at a time, in as many groups as a budget asks for."""
