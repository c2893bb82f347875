"""Run an unchanged training script in a sandboxed process of its own, and record its steps."""
