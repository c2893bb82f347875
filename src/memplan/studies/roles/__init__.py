"""The distinct ranks of a step on several cards: which are recorded, and which are taken to equal them."""
