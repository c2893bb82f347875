"""Batches of different lengths, one after the other through the allocator."""
