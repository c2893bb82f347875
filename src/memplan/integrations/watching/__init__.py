"""Training watched while it runs: peaks beside what is predicted, leaks by line, a post-mortem where memory ends."""
