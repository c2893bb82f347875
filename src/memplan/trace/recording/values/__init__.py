"""Values that a recording does not know: what is said of them, and what is taken in their place."""
