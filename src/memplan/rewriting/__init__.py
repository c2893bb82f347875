"""A plan made real: the kernels, codecs and graphs that run a step as it was planned."""
