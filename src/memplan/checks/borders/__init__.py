"""What a lost border costs, and padding that does not lose it."""
