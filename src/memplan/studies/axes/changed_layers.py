"""Change constructor arguments of layers in a model: the layers are rebuilt, so that their weights have new shapes."""

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
    """Set an attribute to a value in all layers whose names match ``pattern`` (``encoder.*.conv``)."""

    pattern: str
    attribute: str
    value: Any


def change_layers(model: nn.Module, changes: Sequence[LayerChange]) -> nn.Module:
    """Change layers of a model in place and return it; a new model if the model itself matches and is rebuilt.

    Names are those of ``named_modules()``; that of the model itself is empty. If the attribute is an argument of a
    layer's constructor, the layer is rebuilt with new weights and keeps its hooks; any other attribute is set. Raises
    InputError if no matching layer has the attribute, or a layer cannot be rebuilt.
    """
    for change in changes:
        matched = [(name, layer) for name, layer in model.named_modules() if fnmatchcase(name, change.pattern)]
        affected = [
            (name, layer) for name, layer in matched
            if hasattr(layer, change.attribute) or change.attribute in _arguments(layer)
        ]  # fmt: skip
        if not affected:
            raise _no_such_layer(model, change, [type(layer).__name__ for _, layer in matched])
        rebuilt = {id(layer): rebuild_layer(layer, change.attribute, change.value, name) for name, layer in affected}
        if id(model) in rebuilt:
            model = rebuilt[id(model)]
            continue
        for name, layer in list(model.named_modules(remove_duplicate=False)):  # shared layers stay shared
            if id(layer) in rebuilt:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, rebuilt[id(layer)])
    return model


def rebuild_layer(layer: nn.Module, attribute: str, value: Any, name: str = "") -> nn.Module:
    """Return a new layer of the same class with a constructor argument changed, and with all hooks of the layer.

    If ``attribute`` is no argument of the constructor, it is set on the layer, which is returned. Raises InputError if
    the layer does not store its constructor arguments, the constructor refuses the value, or the new layer lacks a
    submodule that had hooks.
    """
    if attribute not in _arguments(layer):
        setattr(layer, attribute, value)
        return layer
    arguments = _constructor_arguments(layer, name)
    if _shapes(layer) != _shapes(_construct(layer, arguments, name)):
        raise _cannot_rebuild(layer, name, "made again with the same arguments, its parameters differ")
    if "forward" in vars(layer):
        raise _cannot_rebuild(layer, name, "its forward was replaced")
    new = _construct(layer, arguments | {attribute: value}, name)
    _copy_hooks(layer, new, name)
    old_parameters = dict(layer.named_parameters())
    for path, parameter in new.named_parameters():
        if path in old_parameters:
            parameter.requires_grad_(old_parameters[path].requires_grad)
    first = next(layer.parameters(), None)
    if first is not None:
        new.to(device=first.device, dtype=first.dtype)
    return new.train(layer.training)


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}


def _copy_hooks(old: nn.Module, new: nn.Module, name: str) -> None:
    """Copy the hooks of a layer and its submodules to the rebuilt layer. Raises InputError if that has others."""
    new_modules = dict(new.named_modules())
    for path, module in old.named_modules():
        count = _torch.count_hooks(module)
        if not count:
            continue
        new_count = _torch.count_hooks(new_modules[path]) if path in new_modules else -1  # -1: no such submodule
        if new_count not in (0, count):
            where = f"its part {path}" if path else "it"
            raise _cannot_rebuild(old, name, f"{where} has hooks, and made anew it has others, or is not there")
        if not new_count:  # otherwise the constructor has registered them
            _torch.copy_hooks(module, new_modules[path])


def _arguments(layer: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the named parameters of the layer's constructor, without device and dtype."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # the constructors of nn.RNN, nn.LSTM and nn.GRU take *args
    constructor = nn.RNNBase if isinstance(layer, (nn.RNN, nn.LSTM, nn.GRU)) else type(layer)
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return {}
    unused = ("device", "dtype", "mode") if constructor is nn.RNNBase else ("device", "dtype")
    return {name: p for name, p in parameters.items() if p.kind not in variadic and name not in unused}


def _constructor_arguments(layer: nn.Module, name: str) -> dict[str, Any]:
    """Return the arguments that a layer was constructed with, read from its attributes.

    Raises InputError if the layer does not store one of them. ``name``: of the layer, for the error.
    """
    arguments: dict[str, Any] = {}
    for argument, parameter in _arguments(layer).items():
        if argument == "bias":  # the attribute is the flag itself (RNNs), or the parameter, None without a bias
            bias = getattr(layer, "bias", parameter.default)
            arguments[argument] = bias if isinstance(bias, bool) else bias is not None
        elif hasattr(layer, argument):
            arguments[argument] = getattr(layer, argument)
        # layers of torch.nn store what matters; those of others may have been constructed without the default
        elif parameter.default is parameter.empty or not type(layer).__module__.startswith("torch.nn."):
            raise _cannot_rebuild(layer, name, f"it does not keep its argument {argument!r}")
    return arguments


def _construct(layer: nn.Module, arguments: dict[str, Any], name: str) -> nn.Module:
    """Construct a layer of the same class. Raises InputError if the constructor raises. ``name``: of the layer."""
    try:
        return type(layer)(**arguments)
    except Exception as error:  # a constructor can raise anything
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"{name or 'the model'} ({type(layer).__name__}) cannot be made so: {type(error).__name__}: {text}",
            expected=f"arguments that {type(layer).__name__} takes",
            do="Choose another value",
        ) from error


def _cannot_rebuild(layer: nn.Module, name: str, why: str) -> InputError:
    """Return the error of a layer that cannot be rebuilt. ``name``: of the layer; ``why``: the end of a sentence."""
    return InputError(
        f"{name or 'the model'} ({type(layer).__name__}) cannot be made anew: {why}",
        expected="layers of torch.nn, or ones that keep each argument of their constructor as an attribute",
        do="Make it an argument of the callable that makes the model, and vary that",
    )


def _no_such_layer(model: nn.Module, change: LayerChange, kinds: Sequence[str]) -> InputError:
    """Return the error of a change without a layer to apply it to; ``kinds`` are the classes of the matching layers."""
    if kinds:
        missing = f"no {change.attribute!r} ({', '.join(sorted(set(kinds)))[:80]})"
        if not change.pattern:
            return InputError(
                f"the model itself has {missing}",
                expected="an attribute of its own",
                do="Name another, or a layer of it",
            )
        return InputError(
            f"the layers that {change.pattern!r} names have {missing}",
            expected="an attribute that one of them has, such as kernel_size of a convolution",
            do="Name another attribute, or other layers",
        )
    names = [name for name, _ in model.named_modules() if name]
    similar = difflib.get_close_matches(change.pattern, names, n=3) or names[:3]
    return InputError(
        f"{type(model).__name__} has no layer {change.pattern!r}",
        expected="a name or a pattern of names, as model.named_modules() has them",
        do=f"Such as {', '.join(similar)}" if similar else "It has no layers",
    )
