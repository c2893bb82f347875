"""Check schedules independently: slow and obvious code that shares nothing with the search."""
