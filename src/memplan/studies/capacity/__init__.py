"""The largest batch, size or sequence that fits."""
