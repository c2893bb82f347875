"""Output for other viewers: Perfetto, CSV, TensorBoard."""
