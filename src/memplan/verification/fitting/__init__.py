"""Make a step fit: plan, rewrite, prove."""
