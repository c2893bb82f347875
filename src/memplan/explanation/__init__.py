"""Where the bytes of a step go, and why."""
