"""A simulation of torch's CUDA caching allocator."""
