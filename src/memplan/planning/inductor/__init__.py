"""Plans for the engine ``inductor``: each pass runs as kernels that Inductor generates."""
