"""A step run on the dry card: asked for here, run in a process that sees the card, made a Trace of torch's history."""
