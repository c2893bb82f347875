"""Adam and AdamW with moments in 8 bits: optimizers of torchao or bitsandbytes, with the options of torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from memplan.errors import UsageError

_COUNTERPARTS = {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit"}
"""Optimizers of torch, and the names of torchao's and bitsandbytes'."""
_KERNELS = ("foreach", "fused")
"""Options that choose kernels, of which the libraries have their own."""
_MISSING = {
    "torchao": ("maximize", "capturable", "differentiable"),
    "bitsandbytes": ("maximize", "capturable", "differentiable", "amsgrad"),
}
"""Options that change what an update computes, or where its numbers are, and that a library's optimizers lack. The
libraries are in order of preference: an update by torchao takes 8 bytes of temporaries an element, on a CPU, and one by
bitsandbytes 0.50 takes 20, and none of it is compiled."""


@dataclass(frozen=True)
class EightBitMoments:
    """A callable of the parameters that makes torchao's counterpart of an Adam or AdamW; bitsandbytes' where torchao is
    not installed.

    Its two moments are codes of 8 bits with a float32 scale for each block of 256 elements, and a table of 256 numbers
    for each tensor (`torchao.optim.AdamW8bit`). As in torchao, moments of tensors with fewer than 4,096 elements, or
    with a number of elements that the block does not divide, stay in the parameter's dtype. bitsandbytes has a table
    for all tensors, and moments in float32 of those with fewer than 4,096 elements alone.

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
            UsageError: neither library is installed, or the one that is has no such optimizer or option; a parameter is
                in float64, or not contiguous, which bitsandbytes would convert.
        """
        exact = self.exact(parameters)
        name = _COUNTERPARTS.get(type(exact))
        if name is None:
            raise UsageError(
                f"moments in 8 bits of {type(exact).__name__}",
                expected="torch.optim's Adam or AdamW, whose counterparts torchao has",
                do="Give one of these as optimizer",
            )
        library = library_of_moments() or "torchao"
        lacking = [option for option in _MISSING[library] if any(group.get(option) for group in exact.param_groups)]
        lacking += _lacking_of_adam(library, exact.param_groups) if name == "Adam8bit" else []
        if library == "bitsandbytes" and any(isinstance(group["lr"], torch.Tensor) for group in exact.param_groups):
            lacking.append("a tensor as lr")
        if lacking:
            raise UsageError(
                f"moments in 8 bits with {' and '.join(lacking)}",
                expected=f"none of these options, which {library}'s optimizers lack",
                do="Leave them out",
            )
        for group in exact.param_groups:
            _check_parameters(group, library)
        left_out = {*_KERNELS, *_MISSING[library], "decoupled_weight_decay"}
        groups = [{key: value for key, value in group.items() if key not in left_out} for group in exact.param_groups]
        return getattr(_import_optimizers(library), name)(groups)


def has_counterpart(optimizer: Any) -> bool:
    """Return whether torchao has a counterpart of this optimizer with moments in 8 bits: of torch's Adam and AdamW."""
    return type(optimizer) in _COUNTERPARTS


def library_of_moments() -> str | None:
    """Return the library whose optimizers store moments in 8 bits: torchao, bitsandbytes where that is not installed,
    or None."""
    return next((library for library in _MISSING if find_spec(library) is not None), None)


def _lacking_of_adam(library: str, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options of Adam's groups that a library's Adam8bit lacks: torchao's adds the decay to the gradient, as
    torch's Adam does by default, and bitsandbytes' decays weights by themselves, as AdamW."""
    if library == "torchao":
        return ["decoupled_weight_decay"] if any(group.get("decoupled_weight_decay") for group in groups) else []
    added = any(group["weight_decay"] and not group.get("decoupled_weight_decay") for group in groups)
    return ["weight_decay that is not decoupled"] if added else []


def _check_parameters(group: Mapping[str, Any], library: str) -> None:
    """Raise UsageError if a parameter of a group is in float64, whose update is computed in float32, or if bitsandbytes
    would convert its memory format."""
    names = group.get("param_names")
    for index, parameter in enumerate(group["params"]):
        shape = "x".join(map(str, parameter.shape)) or "a scalar"
        what = f"moments in 8 bits of {f'{names[index]} ({shape})' if names else f'a parameter ({shape})'}"
        if parameter.dtype == torch.float64:
            raise UsageError(
                f"{what} in float64",
                expected=f"parameters in float32, bfloat16 or float16: {library} computes updates in float32",
                do="Convert the model, or leave moments as they are",
            )
        if library == "bitsandbytes" and not parameter.is_contiguous():
            raise UsageError(
                f"{what}, which is not contiguous",
                expected="contiguous parameters: bitsandbytes converts others in its update",
                do="Convert the model to torch.contiguous_format, or install torchao",
            )


def _import_optimizers(library: str) -> Any:
    """Return a library's module of optimizers. Raises UsageError if it is not installed."""
    if find_spec(library) is None:
        raise UsageError(
            f"moments in 8 bits, and {library} is not installed",
            expected="torchao or bitsandbytes, whose optimizers store them",
            do="Install torchao: pip install 'memplan[quantize]'",
        )
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # they warn about GPU kernels that do not load on a CPU
    try:
        return import_module(f"{library}.optim")
    finally:
        logger.setLevel(level)
