"""Simulation of a trace's memory over time, and of torch's CUDA caching allocator."""
