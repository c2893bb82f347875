"""The real cuDNN, asked on a machine without a GPU which engines it would try for a convolution on a card."""
