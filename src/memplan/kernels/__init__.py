"""Fused forward and backward kernels for those who wire by hand: in Triton on a card, in plain torch elsewhere."""

from memplan.kernels.cross_entropy import cross_entropy, log_probs

__all__ = ["cross_entropy", "log_probs"]
