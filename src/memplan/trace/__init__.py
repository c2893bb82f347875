"""A step as data: recorded on fake tensors, or measured."""
