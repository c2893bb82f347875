"""Distinct ranks of a step on several cards: which to record, and which of the others are equal to them."""
