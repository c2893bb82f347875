"""Receptive fields: which positions of the input each position of a tensor can see, computed along a step's ops."""
