"""Compare plans with what PyTorch itself offers to make a step fit."""
