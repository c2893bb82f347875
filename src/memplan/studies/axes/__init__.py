"""What a study varies."""
