"""Translate an optimizer of torch (SGD, Adam, AdamW, RMSprop, Adagrad) to C functions that update each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, UsageError
from memplan.exporting.kernels.call_writer import number
from memplan.planning.levers.lever import GradientUse

OPTIMIZER_KINDS: Mapping[type, str] = {
    torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam", torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}  # fmt: skip


ARRAYS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"momentum": "momentum_buffer"},
    "adam": {"momentum": "exp_avg", "squares": "exp_avg_sq", "maxima": "max_exp_avg_sq"},
    "rmsprop": {"momentum": "momentum_buffer", "squares": "square_avg"},
    "adagrad": {"squares": "sum"},
}
"""By kind of optimizer: its arrays in the device's state, and their names in PyTorch."""


def arrays_of(kind: str, group: Mapping[str, Any]) -> list[str]:
    """Return the names in the device's state of the arrays that a parameter group of an optimizer has."""
    is_used = {
        "momentum": kind == "adam" or group.get("momentum", 0) != 0, "squares": True,
        "maxima": group.get("amsgrad", False),
    }  # fmt: skip
    return [name for name in ARRAYS[kind] if is_used[name]]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What happens to the gradients before an update.

    Raises:
        UsageError: an option is not valid, or both bounds are set.
    """

    accumulate: int = 1
    """Calls of the step whose gradients are added up for one update."""
    clip_norm: float | None = None
    """Most that the norm of all gradients together may be, as for `torch.nn.utils.clip_grad_norm_`."""
    clip_value: float | None = None
    """Most that each element may be, as for `torch.nn.utils.clip_grad_value_`."""

    def __post_init__(self) -> None:
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            expected = "how many calls make one update, at least 1"
            raise UsageError(f"accumulate={self.accumulate!r}", expected=expected, do="Leave it out for 1")
        for name in ("clip_norm", "clip_value"):
            bound = getattr(self, name)
            is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            if bound is not None and not (is_number and 0 < bound < math.inf):
                raise UsageError(f"{name}={bound!r}", expected="a positive number", do="Leave it out, or give one")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UsageError("clip_norm and clip_value", expected="one of the two", do="Leave one out")

    @property
    def stay_until_update(self) -> bool:
        """Whether all gradients are in RAM until the update."""
        return self.accumulate > 1 or self.clip_norm is not None

    @property
    def use(self) -> GradientUse:
        """Use of each parameter's gradient once it is complete."""
        return GradientUse(accumulates=True) if self.stay_until_update else GradientUse(updates_early=True)

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients of parameters in PyTorch."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)


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

    kind: Callable[..., torch.optim.Optimizer]
    options: tuple[Mapping[str, Any], ...]
    """Options of each group in PyTorch, without the parameters."""
    groups: tuple[UpdateRule, ...]
    group_of: Mapping[str, int]
    """Index of each parameter's group, by the parameter's name in the model."""
    arrays: tuple[str, ...]
    """Names of the optimizer's arrays in the state, each with an element for each weight."""
    gradients: Gradients = field(default_factory=Gradients)

    @property
    def arrays_in_state(self) -> tuple[str, ...]:
        """Names of all arrays of the state with an element for each weight, besides the weights."""
        return (*self.arrays, *(["gradients"] if self.gradients.stay_until_update else []))

    @property
    def group_rate_count(self) -> int:
        """Number of learning rates besides the factor on all: one for each group where there are several."""
        return len(self.groups) if len(self.groups) > 1 else 0

    @property
    def bias_correction_count(self) -> int:
        """Number of bias corrections."""
        return sum(len(group.logarithms) for group in self.groups)

    @property
    def counters_and_factors(self) -> int:
        """Number of counters and factors in the state: rate, step and random number, and what the options add."""
        return 3 + self.bias_correction_count + self.group_rate_count + self.gradients.stay_until_update

    def zero_gradients_matter(self, path: str) -> bool:
        """Return whether an update by a gradient of zeros changes the parameter of this name or its moments."""
        options = self.options[self.group_of[path]]
        is_plain = isinstance(self.kind, type) and OPTIMIZER_KINDS[self.kind] in ("sgd", "adagrad")
        return not is_plain or options.get("momentum", 0) != 0 or options["weight_decay"] != 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a copy of the model in PyTorch."""
        named = dict(model.named_parameters())
        groups = [
            {**options, "params": [named[name] for name, group in self.group_of.items() if group == index]}
            for index, options in enumerate(self.options)
        ]
        return self.kind([group for group in groups if group["params"]])


def update_rules(
    optimizer: Callable[[Any], Any], model: nn.Module, original: nn.Module, gradients: Gradients | None = None
) -> UpdateRules:  # fmt: skip
    """Read the update rules from an optimizer for those of the model's parameters that require a gradient.

    Args:
        optimizer: a callable of the parameters that returns an optimizer.
        model: the model to train.
        original: the model that it is a copy of, whose parameters the optimizer may have been given instead.
        gradients: what happens to them before an update; None: nothing.

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
    kind = OPTIMIZER_KINDS.get(type(instance))
    if kind is None:
        raise InputError(
            f"the optimizer {type(instance).__name__}",
            expected="SGD (with momentum or not), Adam, AdamW, RMSprop or Adagrad",
            do="Choose one of these for the device",
        )
    named_in_both = [*original.named_parameters(), *model.named_parameters()]
    names = {id(parameter): name for name, parameter in named_in_both if name in named}
    gradients = gradients or Gradients()
    groups, group_of = list[UpdateRule](), dict[str, int]()
    several = len(instance.param_groups) > 1
    for index, group in enumerate(instance.param_groups):
        shared = _shared_macros(group, f" * s->rates[{index}]" if several else "", gradients.clip_value)
        decoupled = group.get("decoupled_weight_decay", isinstance(instance, torch.optim.AdamW))
        adam = partial(_adam, index=index, decoupled=decoupled)
        rule = {"sgd": _sgd, "rmsprop": _rmsprop, "adagrad": _adagrad, "adam": adam}[kind](group)
        groups.append(replace(rule, defines={**shared, **rule.defines}))
        group_of |= {names[id(parameter)]: index for parameter in group["params"] if id(parameter) in names}
    used_arrays = {name for group in instance.param_groups for name in arrays_of(kind, group)}
    arrays = tuple(name for name in ARRAYS[kind] if name in used_arrays)
    if not group_of:
        raise InputError(
            "The optimizer has none of the model's parameters", expected="those that `optimizer` is called with, or "
            "those of the model itself", do="Pass such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        )  # fmt: skip
    options = tuple({key: value for key, value in group.items() if key != "params"} for group in instance.param_groups)
    return UpdateRules(type(instance), options, tuple(groups), group_of, arrays, gradients)


def _sgd(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a group of SGD."""
    return UpdateRule(
        "update_sgd",
        {
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
        "HAS_MOMENTUM": str(int(group["momentum"] != 0)), "MOMENTUM": number(group["momentum"]),
        "ALPHA": number(group["alpha"]), "REST": number(1 - group["alpha"]), "EPSILON": number(group["eps"]),
    }  # fmt: skip
    return UpdateRule("update_rmsprop", defines)


def _adagrad(group: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of a group of Adagrad."""
    if group["initial_accumulator_value"]:
        found, expected = f"initial_accumulator_value={group['initial_accumulator_value']}", "Adagrad that starts at 0"
        raise InputError(found, expected=expected, do="Leave it out")
    falling = f" / (1 + {number(group['lr_decay'])} * (float)(s->step - 1))" if group["lr_decay"] else ""
    return UpdateRule("update_adagrad", {"EPSILON": number(group["eps"]), "FALLING": falling})


def _adam(group: Mapping[str, Any], index: int, decoupled: bool) -> UpdateRule:
    """Return the rule of parameter group number `index` of Adam. With `decoupled`, weight decay does not go through the
    gradient, as in AdamW."""
    betas = [float(beta) for beta in group["betas"]]
    defines = {
        "GROUP": str(index), "DECOUPLED": str(int(decoupled)), "AMSGRAD": str(int(group["amsgrad"])),
        "BETA2": number(betas[1]), "EPSILON": number(group["eps"]),
        "REST1": number(1 - betas[0]), "REST2": number(1 - betas[1]),
    }  # fmt: skip
    return UpdateRule("update_adam", defines, tuple(math.log(beta) if beta else -math.inf for beta in betas))


def _shared_macros(group: Mapping[str, Any], rate_factor: str, clip_value: float | None) -> dict[str, str]:
    """Return the macros that all update rules read: gradient, weight decay and learning rate, in C.

    `rate_factor` is C text behind the learning rate: a further factor, or empty. The gradient is clipped to
    `clip_value` unless that is None.
    """
    clipped = "(g)" if clip_value is None else f"clip(g, {number(-clip_value)}, {number(clip_value)})"
    return {
        "GRADIENT(g)": f"-{clipped}" if group.get("maximize") else clipped,
        "DECAY": number(group["weight_decay"]),
        "RATE": f"({number(float(group['lr']))} * s->rate{rate_factor})",
    }
