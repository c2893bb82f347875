"""Fused forward and backward kernels for those who wire by hand: in Triton on a card, in plain torch elsewhere."""

from memplan.kernels.cross_entropy import cross_entropy, log_probs
from memplan.kernels.gated import geglu, swiglu
from memplan.kernels.norms import layer_norm, rms_norm

__all__ = ["cross_entropy", "geglu", "layer_norm", "log_probs", "rms_norm", "swiglu"]
