"""An independent checker: slow, obvious, shares no code with the search."""
