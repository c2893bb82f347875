"""Many points of a step."""
