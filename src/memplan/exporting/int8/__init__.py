"""The frozen part of a step in eight bits: which layers, their integer weights, and the graph that runs them."""
