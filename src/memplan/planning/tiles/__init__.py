"""Tiles: a segment of a step runs piece by piece along an axis, forward and backward, to the same results but for the
order of sums."""
