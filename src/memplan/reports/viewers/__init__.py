"""A step for other people's viewers: Perfetto, tables as CSV, TensorBoard."""
