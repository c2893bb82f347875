"""One file a lever: a way to use less memory."""
