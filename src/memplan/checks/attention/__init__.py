"""Attention that is written out: where a step has it, and the same step with the fused call instead."""
