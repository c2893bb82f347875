"""Translate an optimizer of torch (SGD, Adam, AdamW, RMSprop) to the C functions that update each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError
from memplan.exporting.kernels.call_writer import number

KINDS: Mapping[type, str] = {
    torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam", torch.optim.RMSprop: "rmsprop"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The update of one parameter group of an optimizer."""

    template: str
    """Name of its C function in kernels/templates."""
    defines: Mapping[str, str]
    """Macros of the template: the options of the group."""
    logarithms: tuple[float, ...] = ()
    """Logarithms of Adam's betas; the device's state has a bias correction for each."""


@dataclass(frozen=True)
class UpdateRules:
    """The parameter groups of an optimizer."""

    name: str
    groups: tuple[UpdateRule, ...]
    group_of: Mapping[str, int]
    """Index of each parameter's group, by the parameter's name in the model."""
    momentum: bool
    squares: bool

    @property
    def floats(self) -> int:
        """Floats of optimizer state for each weight."""
        return self.momentum + self.squares


def update_rules(optimizer: Callable[[Any], Any], model: nn.Module) -> UpdateRules:
    """Read the update rules from an optimizer for those of the model's parameters that require a gradient.

    Args:
        optimizer: a callable of the parameters that returns an optimizer.
        model: the model to train.

    Raises:
        InputError: no C function implements the optimizer or one of its options, or no parameter requires a gradient.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise InputError(
            "No parameter of the model needs a gradient",
            expected="weights that the step trains",
            do="Set requires_grad of the layers to train",
        )
    instance = optimizer(list(named.values()))
    kind = KINDS.get(type(instance))
    if kind is None:
        raise InputError(
            f"the optimizer {type(instance).__name__}",
            expected="SGD (with momentum or not), Adam, AdamW or RMSprop",
            do="Choose one of these for the device",
        )
    names = {id(parameter): name for name, parameter in named.items()}
    groups, group_of = list[UpdateRule](), dict[str, int]()
    for at, group in enumerate(instance.param_groups):
        groups.append(
            _sgd(group)
            if kind == "sgd"
            else _rmsprop(group)
            if kind == "rmsprop"
            else _adam(group, at, group.get("decoupled_weight_decay", isinstance(instance, torch.optim.AdamW)))
        )
        group_of |= {names[id(parameter)]: at for parameter in group["params"] if id(parameter) in names}
    momentum = kind == "adam" or any(group["momentum"] for group in instance.param_groups)
    return UpdateRules(type(instance).__name__, tuple(groups), group_of, momentum, kind != "sgd")


def _sgd(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a group of SGD."""
    return UpdateRule(
        "update_sgd",
        {
            **_shared(group),
            "HAS_MOMENTUM": str(int(group["momentum"] != 0)),
            "MOMENTUM": number(group["momentum"]),
            "UNDAMPED": number(1 - group["dampening"]),
            "NESTEROV": str(int(group["nesterov"])),
        },
    )


def _rmsprop(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a group of RMSprop."""
    if group["centered"]:
        raise InputError("centered=True", expected="RMSprop without centered", do="Leave it out")
    defines = {
        **_shared(group), "HAS_MOMENTUM": str(int(group["momentum"] != 0)), "MOMENTUM": number(group["momentum"]),
        "ALPHA": number(group["alpha"]), "REST": number(1 - group["alpha"]), "EPSILON": number(group["eps"]),
    }  # fmt: skip
    return UpdateRule("update_rmsprop", defines)


def _adam(group: Mapping[str, Any], at: int, decoupled: bool) -> UpdateRule:
    """Return the rule of group `at` of Adam; `decoupled`: weights decay by themselves, as in AdamW."""
    if group["amsgrad"]:
        raise InputError("amsgrad=True", expected="Adam without amsgrad", do="Leave it out")
    betas = [float(beta) for beta in group["betas"]]
    defines = {
        **_shared(group), "GROUP": str(at), "DECOUPLED": str(int(decoupled)),
        "BETA2": number(betas[1]), "EPSILON": number(group["eps"]),
        "REST1": number(1 - betas[0]), "REST2": number(1 - betas[1]),
    }  # fmt: skip
    return UpdateRule("update_adam", defines, tuple(math.log(beta) if beta else -math.inf for beta in betas))


def _shared(group: Mapping[str, Any]) -> dict[str, str]:
    sign = -1.0 if group.get("maximize") else 1.0
    return {"SIGN": number(sign), "DECAY": number(group["weight_decay"]), "RATE": number(float(group["lr"]))}
