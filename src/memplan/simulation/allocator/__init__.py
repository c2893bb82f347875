"""torch's caching allocator."""
