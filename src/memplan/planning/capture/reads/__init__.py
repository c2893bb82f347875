"""Python values that a captured step can read: the code that ran, the values that it names, and their changes."""
