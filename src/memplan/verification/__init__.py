"""Verify planned steps against the original: outputs, gradients, buffers, random streams and peak memory."""
