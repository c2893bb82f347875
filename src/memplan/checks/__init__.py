"""One file a trap: Trace -> Findings."""
