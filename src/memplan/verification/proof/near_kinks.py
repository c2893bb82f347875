"""Take the decisions of activations and max pools that rounding can flip the other way.

The derivative of ReLU jumps at zero, and that of a max pool where two elements of a window are equal. A value within
rounding of such a kink can lie on either side of it: the gradients of two right steps then differ by a whole element,
3e-3 of a ResNet-18's, where they differ by 3e-6 otherwise. Whether a step has such an error is chance. The error of a
step in which all these values lie on the other side says how large it may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NEAR = 256
"""Distance to a kink that counts as near, in eps of the input's root mean square: rounding grows from layer to layer,
in a ResNet-18 up to 218."""

_KINKS: Mapping[str, Sequence[float]] = {
    "relu": (0.0,), "leaky_relu": (0.0,), "prelu": (0.0,), "elu": (0.0,), "celu": (0.0,), "selu": (0.0,), "abs": (0.0,),
    "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0), "hardsigmoid": (-3.0, 3.0),
}  # fmt: skip
"""Where the derivative of a function jumps, by its name."""
_BOUNDED = ("hardtanh", "clamp", "clip", "clamp_min", "clamp_max")
"""Functions whose derivative jumps at the bounds that they take."""
_POOLS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "max_pool1d": (1, F.max_pool1d_with_indices),
    "max_pool2d": (2, F.max_pool2d_with_indices),
    "max_pool3d": (3, F.max_pool3d_with_indices),
}


class NearKinks(TorchFunctionMode):
    """Within this context, inputs near a kink lie on its other side. Other values stay, so that outputs hardly change.

    Only float32 and float64: in lower precision rounding flips so many decisions that any step's error shows it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a function of torch; an activation or a max pool with its input moved across nearby kinks."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        x = _input_with_kinks(func, args, kwargs)
        if x is None or not _is_wide(x):
            return func(*args, **kwargs)
        near = _distance_to_flip(x.detach())
        options = {key: value for key, value in kwargs.items() if key != "input"}
        if name in _POOLS:
            options.pop("return_indices", None)
            return _pooled(*_POOLS[name], x, args[1:], options, near)
        offset = _offset_across(x.detach(), _kinks(name.strip("_"), args[1:3], kwargs), near)
        has_inplace = kwargs.get("inplace") or any(arg is True for arg in args[1:])
        if has_inplace or (name.endswith("_") and not name.endswith("__")):
            return func(x.add_(offset), *args[1:], **options)
        return func(x + offset, *args[1:], **options)


def _input_with_kinks(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the input of a function whose derivative jumps; None for other functions."""
    name, x = getattr(func, "__name__", ""), args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or not x.numel():
        return None
    return x if name in _POOLS or _kinks(name.strip("_"), args[1:3], kwargs) else None


def _is_wide(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)


def _distance_to_flip(x: Tensor) -> float:
    """Return the distance to a kink within which rounding of x may flip a decision."""
    return NEAR * torch.finfo(x.dtype).eps * float(x.norm()) / math.sqrt(x.numel())


def _kinks(name: str, bounds: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[float]:
    """Return the inputs at which the derivative of the function ``name`` jumps; empty if it is smooth. Some jump at
    bounds, which are in its arguments after the input (``bounds``) or in ``kwargs``."""
    if name not in _BOUNDED:
        return _KINKS.get(name, ())
    candidates = [*bounds, *(kwargs.get(key) for key in ("min", "max", "min_val", "max_val"))]
    numbers = [float(bound) for bound in candidates if isinstance(bound, (int, float)) and not isinstance(bound, bool)]
    return numbers or ((-1.0, 1.0) if name == "hardtanh" else ())


def _offset_across(x: Tensor, kinks: Sequence[float], near: float) -> Tensor:
    """Return the offset that mirrors each value nearer to a kink than ``near`` to its other side; 0 for all others."""
    offset = torch.zeros_like(x)
    for kink in kinks:
        distance = x - kink
        offset = torch.where(distance.abs() < near, -2 * distance, offset)
    return offset


def _pooled(
    space: int, pool: Callable[..., Any], x: Tensor, args: Sequence[Any], options: Mapping[str, Any], near: float
) -> Tensor:
    """Return a max pool's result, with the second largest element of a window where it is nearer to the largest than
    ``near``.

    ``pool`` returns the result and the index of each window's largest element in the last ``space`` dimensions,
    flattened. ``args``, ``options``: its arguments after the input x.
    """
    flat = x.detach().flatten(-space)
    with torch.no_grad():
        _, largest = pool(x.detach(), *args, **options)
        indices = largest.flatten(-space)
        lowered = flat.scatter(-1, indices, flat.gather(-1, indices) - near)
        _, chosen = pool(lowered.view(x.shape), *args, **options)
    return x.flatten(-space).gather(-1, chosen.flatten(-space)).view(chosen.shape)
