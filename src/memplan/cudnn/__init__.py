"""Queries the real cuDNN, on a machine without a GPU, for the engines and workspaces of a convolution on a card."""
