"""Fused forward and backward kernels for those who wire by hand: in Triton on a card, in plain torch elsewhere."""

from memplan.kernels.channel_norms import batch_norm_act, group_norm_act, instance_norm_act
from memplan.kernels.cross_entropy import cross_entropy, log_probs
from memplan.kernels.depthwise import depthwise_conv
from memplan.kernels.dice import dice_cross_entropy
from memplan.kernels.gated import geglu, swiglu
from memplan.kernels.norms import layer_norm, rms_norm
from memplan.kernels.softmax import softmax_dropout
from memplan.kernels.updates import adamw_step, sgd_step

__all__ = [
    "adamw_step",
    "batch_norm_act",
    "cross_entropy",
    "depthwise_conv",
    "dice_cross_entropy",
    "geglu",
    "group_norm_act",
    "instance_norm_act",
    "layer_norm",
    "log_probs",
    "rms_norm",
    "sgd_step",
    "softmax_dropout",
    "swiglu",
]
