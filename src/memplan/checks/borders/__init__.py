"""The memory that padding costs where a model loses the border of its input, and how to add it."""
