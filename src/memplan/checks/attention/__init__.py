"""Attention that a step writes out: find it, and record the step with a fused call instead."""
