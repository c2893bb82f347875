"""Two sides beside each other."""
