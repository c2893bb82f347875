"""A step that runs on a card, real or emulated: torch's memory history and counters, joined to ops and causes."""
