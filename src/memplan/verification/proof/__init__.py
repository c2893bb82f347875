"""A candidate held against its reference."""
