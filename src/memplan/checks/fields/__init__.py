"""Receptive fields: which positions of the input each position of a tensor can see, followed through a step's ops."""
