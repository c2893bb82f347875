"""Adam and AdamW with moments in 8 bits: torchao's optimizers, with the options of torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from memplan.errors import UsageError

_COUNTERPARTS = {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit"}
"""Optimizers of torch, and the names of torchao's."""
_KERNELS = ("foreach", "fused")
"""Options that choose kernels, which torchao compiles."""
_MISSING = ("maximize", "capturable", "differentiable")
"""Options that change what an update computes, or where its numbers are, and that torchao's optimizers lack."""


@dataclass(frozen=True)
class EightBitMoments:
    """A callable of the parameters that makes torchao's counterpart of an Adam or AdamW.

    Its two moments are codes of 8 bits with a float32 scale for each block of 256 elements, and a table of 256 numbers
    for each tensor (`torchao.optim.AdamW8bit`). As in torchao, moments of tensors with fewer than 4,096 elements, or
    with a number of elements that the block does not divide, stay in the parameter's dtype.

    Example:
        >>> optimizer = EightBitMoments(torch.optim.AdamW)(model.parameters())
        >>> type(optimizer).__name__
        'AdamW8bit'
    """

    exact: Callable[[Any], Any]
    """A callable of the parameters that makes torch's optimizer."""

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer, with the groups and options that ``exact`` gives these parameters. Further keys of a
        group, such as the ``initial_lr`` of a scheduler, are kept.

        Raises:
            UsageError: torchao is not installed, or has no such optimizer or option; a parameter is in float64.
        """
        exact = self.exact(parameters)
        name = _COUNTERPARTS.get(type(exact))
        if name is None:
            raise UsageError(
                f"moments in 8 bits of {type(exact).__name__}",
                expected="torch.optim's Adam or AdamW, whose counterparts torchao has",
                do="Give one of these as optimizer",
            )
        lacking = [option for option in _MISSING if any(group.get(option) for group in exact.param_groups)]
        if name == "Adam8bit" and any(group.get("decoupled_weight_decay") for group in exact.param_groups):
            lacking.append("decoupled_weight_decay")
        if lacking:
            raise UsageError(
                f"moments in 8 bits with {' and '.join(lacking)}",
                expected="none of these options, which torchao's optimizers lack",
                do="Leave them out",
            )
        for group in exact.param_groups:
            _check_dtypes(group)
        left_out = {*_KERNELS, *_MISSING, "decoupled_weight_decay"}
        groups = [{key: value for key, value in group.items() if key not in left_out} for group in exact.param_groups]
        return getattr(_import_torchao(), name)(groups)


def has_counterpart(optimizer: Any) -> bool:
    """Return whether torchao has a counterpart of this optimizer with moments in 8 bits: of torch's Adam and AdamW."""
    return type(optimizer) in _COUNTERPARTS


def _check_dtypes(group: Mapping[str, Any]) -> None:
    """Raise UsageError if a parameter of a group is in float64, whose update torchao computes in float32."""
    names = group.get("param_names")
    for index, parameter in enumerate(group["params"]):
        if parameter.dtype == torch.float64:
            shape = "x".join(map(str, parameter.shape)) or "a scalar"
            what = f"{names[index]} ({shape})" if names else f"a parameter ({shape})"
            raise UsageError(
                f"moments in 8 bits of {what} in float64",
                expected="parameters in float32, bfloat16 or float16: torchao computes updates in float32",
                do="Convert the model, or leave moments as they are",
            )


def _import_torchao() -> Any:
    """Return torchao's module of optimizers. Raises UsageError if it is not installed."""
    if find_spec("torchao") is None:
        raise UsageError(
            "moments in 8 bits, and torchao is not installed",
            expected="torchao, whose optimizers store them",
            do="Install it: pip install 'memplan[quantize]'",
        )
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about its GPU kernels that do not load on a CPU
    try:
        import torchao.optim as api
    finally:
        logger.setLevel(level)
    return api
