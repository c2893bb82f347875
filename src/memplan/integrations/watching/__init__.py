"""`memplan.watch`: measured and predicted peaks of a running training, leaks by line, out-of-memory post-mortems."""
