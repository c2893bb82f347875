"""The update of each parameter, as torch's optimizer would do it: SGD, Adam, AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError
from memplan.exporting.kernels.call_writer import number

KINDS: Mapping[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """One group of an optimizer's parameters."""

    template: str
    """Of its C function, in kernels/templates."""
    defines: Mapping[str, str]
    """Numbers of the group, by the name that the template has for them."""
    logarithms: tuple[float, ...] = ()
    """Logarithms of Adam's betas: the state holds a correction of each."""


@dataclass(frozen=True)
class UpdateRules:
    """An optimizer's groups, and which one each parameter is in."""

    name: str
    groups: tuple[UpdateRule, ...]
    group_of: Mapping[str, int]
    """By the parameter's name in the model."""
    momentum: bool
    squares: bool

    @property
    def floats(self) -> int:
        """Floats that it holds for each weight."""
        return self.momentum + self.squares


def update_rules(optimizer: Callable[[Any], Any], model: nn.Module) -> UpdateRules:
    """Read an optimizer's rules.

    Args:
        optimizer: a callable of the parameters that returns an optimizer.
        model: whose parameters that need a gradient are updated.

    Raises:
        InputError: an optimizer, or an option of one, that no C function does.
    """
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not named:
        raise InputError(
            "No parameter of the model needs a gradient",
            expected="weights that the step trains",
            do="Set requires_grad of the layers to train",
        )
    made = optimizer(list(named.values()))
    kind = KINDS.get(type(made))
    if kind is None:
        raise InputError(
            f"the optimizer {type(made).__name__}",
            expected="SGD (with momentum or not), Adam or AdamW",
            do="Choose one of these for the device",
        )
    names = {id(one): name for name, one in named.items()}
    groups, group_of = list[UpdateRule](), dict[str, int]()
    for at, group in enumerate(made.param_groups):
        groups.append(
            _sgd(group)
            if kind == "sgd"
            else _adam(group, at, group.get("decoupled_weight_decay", isinstance(made, torch.optim.AdamW)))
        )
        group_of |= {names[id(one)]: at for one in group["params"] if id(one) in names}
    momentum = kind == "adam" or any(group["momentum"] for group in made.param_groups)
    return UpdateRules(type(made).__name__, tuple(groups), group_of, momentum, kind == "adam")


def _sgd(group: Mapping[str, Any]) -> UpdateRule:
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


def _adam(group: Mapping[str, Any], at: int, decoupled: bool) -> UpdateRule:
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
