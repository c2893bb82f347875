"""Layers of a model with other arguments: made anew, so that their weights have the shapes that follow."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from memplan import _torch
from memplan.errors import InputError


@dataclass(frozen=True)
class LayerChange:
    """Layers whose names match ``pattern`` (``encoder.*.conv``), with another value of an attribute."""

    pattern: str
    attribute: str
    value: Any


def change_layers(model: nn.Module, changes: Sequence[LayerChange]) -> nn.Module:
    """Return the model with changed layers; the model itself is changed, or another returned where it is such a layer.

    Names are those of ``named_modules()``; that of the model itself is empty. A layer is made anew where the attribute
    is an argument of its constructor, so that a convolution's weight has the shape of its new kernel, and keeps its
    hooks; any other attribute is set.

    Raises:
        InputError: no layer of that name has the attribute, or one cannot be made anew.
    """
    for change in changes:
        matched = [(name, layer) for name, layer in model.named_modules() if fnmatchcase(name, change.pattern)]
        having = [(name, layer) for name, layer in matched if _has(layer, change.attribute)]
        if not having:
            raise _without(model, change, [type(layer).__name__ for _, layer in matched])
        made: dict[int, nn.Module] = {}  # a layer that is used in two places stays one
        for name, layer in having:
            if id(layer) not in made:
                made[id(layer)] = changed_layer(layer, change.attribute, change.value, name)
        if id(model) in made:
            model = made[id(model)]
            continue
        for name, layer in list(model.named_modules(remove_duplicate=False)):
            if id(layer) in made:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, made[id(layer)])
    return model


def changed_layer(layer: nn.Module, attribute: str, value: Any, name: str = "") -> nn.Module:
    """Return a layer of the same kind with another value of an attribute; the layer itself where that is no argument.

    It has the hooks of the layer, and of its parts.

    Raises:
        InputError: the layer does not keep what it was made with, its kind refuses the value, or a hook has no place.
    """
    if attribute not in _arguments(layer):
        setattr(layer, attribute, value)
        return layer
    given = _given(layer, name)
    if _shapes(layer) != _shapes(_make(layer, given, name)):
        raise _not_remade(layer, name, "made again with the same arguments, its parameters differ")
    if "forward" in vars(layer):
        raise _not_remade(layer, name, "its forward was replaced")
    made = _make(layer, given | {attribute: value}, name)
    _hand_on_hooks(layer, made, name)
    old = dict(layer.named_parameters())
    for path, parameter in made.named_parameters():
        if path in old:
            parameter.requires_grad_(old[path].requires_grad)
    first = next(layer.parameters(), None)
    if first is not None:
        made.to(device=first.device, dtype=first.dtype)
    return made.train(layer.training)


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


def _hand_on_hooks(old: nn.Module, new: nn.Module, name: str) -> None:
    parts = dict(new.named_modules())
    for path, part in old.named_modules():
        count = _torch.count_hooks(part)
        if not count:
            continue
        own = _torch.count_hooks(parts[path]) if path in parts else -1
        if own not in (0, count):
            where = f"its part {path}" if path else "it"
            raise _not_remade(old, name, f"{where} has hooks, and made anew it has others, or is not there")
        if not own:  # else its constructor gives it these hooks
            _torch.copy_hooks(part, parts[path])


def _has(layer: nn.Module, attribute: str) -> bool:
    return hasattr(layer, attribute) or attribute in _arguments(layer)


def _arguments(layer: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kind = nn.RNNBase if isinstance(layer, (nn.RNN, nn.LSTM, nn.GRU)) else type(layer)  # their own say *args
    try:
        found = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return {}
    unused = ("device", "dtype", "mode") if kind is nn.RNNBase else ("device", "dtype")
    return {name: one for name, one in found.items() if one.kind not in kinds and name not in unused}


def _given(layer: nn.Module, name: str) -> dict[str, Any]:
    """Read the arguments that a layer was made with off its attributes."""
    given: dict[str, Any] = {}
    for argument, parameter in _arguments(layer).items():
        if argument == "bias":
            given[argument] = getattr(layer, "bias", parameter.default) is not None
            if isinstance(getattr(layer, "bias", None), bool):
                given[argument] = layer.bias
        elif hasattr(layer, argument):
            given[argument] = getattr(layer, argument)
        elif parameter.default is parameter.empty:
            raise _not_remade(layer, name, f"it does not keep its argument {argument!r}")
        elif not type(layer).__module__.startswith("torch.nn."):
            # nothing tells what it was made with, and a default could make another layer of it
            raise _not_remade(layer, name, f"it does not keep its argument {argument!r}")
    return given


def _make(layer: nn.Module, given: dict[str, Any], name: str) -> nn.Module:
    try:
        return type(layer)(**given)
    except Exception as error:  # a constructor can refuse in any way
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"{name or 'the model'} ({type(layer).__name__}) cannot be made so: {type(error).__name__}: {text}",
            expected=f"arguments that {type(layer).__name__} takes",
            do="Choose another value",
        ) from error


def _not_remade(layer: nn.Module, name: str, why: str) -> InputError:
    return InputError(
        f"{name or 'the model'} ({type(layer).__name__}) cannot be made anew: {why}",
        expected="layers of torch.nn, or ones that keep each argument of their constructor as an attribute",
        do="Make it an argument of the callable that makes the model, and vary that",
    )


def _without(model: nn.Module, change: LayerChange, kinds: Sequence[str]) -> InputError:
    title = type(model).__name__
    if kinds:
        found = f"no {change.attribute!r} ({', '.join(sorted(set(kinds)))[:80]})"
        if not change.pattern:
            return InputError(
                f"the model itself has {found}", expected="an attribute of its own", do="Name another, or a layer of it"
            )
        return InputError(
            f"the layers that {change.pattern!r} names have {found}",
            expected="an attribute that one of them has, such as kernel_size of a convolution",
            do="Name another attribute, or other layers",
        )
    names = [name for name, _ in model.named_modules() if name]
    near = difflib.get_close_matches(change.pattern, names, n=3) or names[:3]
    return InputError(
        f"{title} has no layer {change.pattern!r}",
        expected="a name or a pattern of names, as model.named_modules() has them",
        do=f"Such as {', '.join(near)}" if near else "It has no layers",
    )
