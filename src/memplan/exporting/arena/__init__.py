"""Addresses: how long each buffer lives, where it lies, and an independent check of both."""
