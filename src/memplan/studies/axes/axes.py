"""Axes of a study: each takes a subject and a value and returns another subject."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from memplan._text import whole_number
from memplan.errors import InputError
from memplan.studies.axes.changed_layers import LayerChange
from memplan.studies.axes.subject import Subject
from memplan.trace.spec import Spec
from memplan.trace.step import copy_module

PRECISIONS: Mapping[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16-true": (None, torch.bfloat16),
    "fp16-true": (None, torch.float16),
}
"""The autocast, and the dtype of weights and inputs."""

_BATCH_NAMES = ("batch", "batch_size")


class Axis(Protocol):
    """Something of a step that has a value at each point of a study."""

    @property
    def name(self) -> str:
        """Name of the axis in rows."""
        ...

    @property
    def unit(self) -> str:
        """Unit of its measure: ``sample``, ``voxel``; the axis's name where that has no word."""
        ...

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with this value.

        Raises:
            InputError: the subject has no such axis, or the axis no such value.
        """
        ...

    def measure(self, value: Any) -> float | None:
        """Return the number that bytes grow with along this axis; None of a value that is no number."""
        ...


@dataclass(frozen=True)
class Batch:
    """The leading dimension of inputs and targets, or the callable's argument ``batch`` or ``batch_size``."""

    name: str = "batch"
    unit: str = "sample"

    def at(self, subject: Subject, value: Any) -> Subject:
        """See `Axis`."""
        size = whole(value, self.name)
        argument = next((name for name in _BATCH_NAMES if name in subject.parameters()), None)
        if argument is None and subject.options.batch is None:
            raise InputError(
                f"{subject.title} has no batch to vary: no input with a leading dimension",
                expected=f"an input, or a target with an argument named {' or '.join(_BATCH_NAMES)}",
                do="Give an input, or vary the argument that stands for it by its name",
            )
        changed = subject if argument is None else subject.with_arguments(**{argument: size})
        return replace(changed, options=subject.options.with_batch(size))

    def measure(self, value: Any) -> float | None:
        """See `Axis`."""
        return float(value)


@dataclass(frozen=True)
class Size:
    """The spatial dimensions of image inputs, and of all inputs and targets that share them.

    A value is a number for all of them, or one for each: ``"96x96x48"``, ``(96, 96, 48)``.
    """

    name: str = "size"
    dims: int = 2
    """How many spatial dimensions there are."""
    aspect: tuple[float, ...] | None = None
    """Factors of a single number, one for each dimension."""
    divisible: int = 1
    """Sizes are rounded down to a multiple of it, where an aspect makes fractions."""

    @property
    def unit(self) -> str:
        """See `Axis`."""
        return {1: "position", 2: "pixel"}.get(self.dims, "voxel")

    def at(self, subject: Subject, value: Any) -> Subject:
        """See `Axis`."""
        sizes = self.sizes(value)
        options = subject.options
        old = _image(subject)
        if old is None:
            return _argument_instead(subject, self.name, value, "an image among its inputs: 1x3x224x224, 1x1x96x96x96")
        change = lambda shape: (*shape[: -len(old)], *sizes) if shape[-len(old) :] == old else shape  # noqa: E731
        return replace(subject, options=_reshaped(options, change))

    def sizes(self, value: Any) -> tuple[int, ...]:
        """Return the spatial dimensions at a value."""
        if isinstance(value, str) and "x" in value:
            value = tuple(part if (size := whole_number(part.strip())) is None else size for part in value.split("x"))
        if isinstance(value, (list, tuple)):
            if len(value) != self.dims:
                raise InputError(
                    f"{self.name} {'x'.join(map(str, value))} has {len(value)} dimensions",
                    expected=f"{self.dims}, as the input has",
                    do="Give one for each, or one number for all",
                )
            return tuple(whole(part, self.name) for part in value)
        size = whole(value, self.name)
        if self.aspect is None:
            return (size,) * self.dims
        step = self.divisible
        return tuple(max(step, int(size * share + 1e-9) // step * step) for share in self.aspect)

    def measure(self, value: Any) -> float | None:
        """See `Axis`."""
        return float(math.prod(self.sizes(value)))


@dataclass(frozen=True)
class Length:
    """The length of sequences: dimension 1 of token inputs, or of (batch, length, features), and of what shares it."""

    name: str = "sequence"
    unit: str = "token"

    def at(self, subject: Subject, value: Any) -> Subject:
        """See `Axis`."""
        length = whole(value, self.name)
        tokens = _sequence(subject)
        if tokens is None:
            return _argument_instead(subject, self.name, value, "a sequence among its inputs: 8x1024:int64<50257")
        return replace(subject, options=_reshaped(subject.options, lambda shape: _lengthened(shape, tokens, length)))

    def measure(self, value: Any) -> float | None:
        """See `Axis`."""
        return float(value)


@dataclass(frozen=True)
class Precision:
    """``fp32``, ``bf16``, ``fp16`` (autocast), ``bf16-true``, ``fp16-true`` (weights and inputs converted)."""

    name: str = "precision"
    unit: str = "precision"

    def at(self, subject: Subject, value: Any) -> Subject:
        """See `Axis`."""
        if value not in PRECISIONS:
            raise InputError(f"precision {value!r}", expected=f"one of {', '.join(PRECISIONS)}", do="Choose one")
        autocast, dtype = PRECISIONS[value]
        options = replace(subject.options, autocast=autocast, dtype=dtype)
        if dtype is None:
            return replace(subject, options=options)
        return replace(subject, options=_mapped(options, lambda leaf: _converted(leaf, dtype)))

    def measure(self, value: Any) -> float | None:
        """See `Axis`."""
        return None


@dataclass(frozen=True)
class Argument:
    """An argument of the callable that makes the model or the step."""

    name: str

    @property
    def unit(self) -> str:
        """See `Axis`."""
        return self.name

    def at(self, subject: Subject, value: Any) -> Subject:
        """See `Axis`."""
        known = subject.parameters()
        free = any(one.kind is one.VAR_KEYWORD for one in known.values())
        named = [name for name, one in known.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        if self.name not in named and not free:
            near = difflib.get_close_matches(self.name, [*_OWN, *named], n=3)
            raise InputError(
                f"{subject.title} has no argument {self.name!r}",
                expected=f"{', '.join(_OWN)}" + f", or one of its arguments: {', '.join(named[:10])}" * bool(named),
                do=f"Did you mean {' or '.join(near)}?" if near else "Vary another, or name a callable that takes it",
            )
        return subject.with_arguments(**{self.name: value})

    def measure(self, value: Any) -> float | None:
        """See `Axis`."""
        return number(value)


@dataclass(frozen=True)
class Layers:
    """An attribute of the layers that a pattern names: ``encoder.*.kernel_size``."""

    pattern: str
    attribute: str

    @property
    def name(self) -> str:
        """See `Axis`."""
        return f"{self.pattern}.{self.attribute}"

    @property
    def unit(self) -> str:
        """See `Axis`."""
        return self.attribute

    def at(self, subject: Subject, value: Any) -> Subject:
        """See `Axis`. Whether there are such layers is known when the model is made."""
        change = LayerChange(self.pattern, self.attribute, value)
        return replace(subject, changes=(*subject.changes, change))

    def measure(self, value: Any) -> float | None:
        """See `Axis`."""
        return number(value)


_OWN: dict[str, Callable[[Subject], Axis]] = {
    "batch": lambda _: Batch(),
    "size": lambda subject: _size("size", subject),
    "patch": lambda subject: _size("patch", subject),
    "sequence": lambda _: Length(),
    "precision": lambda _: Precision(),
}


def axis_of(name: str, subject: Subject) -> Axis:
    """Return the axis of a name: one of ``batch``, ``size``, ``patch``, ``sequence``, ``precision``;
    ``LAYERS.attribute`` where there is a dot in it; else an argument of the callable."""
    if name in _OWN:
        return _OWN[name](subject)
    pattern, dot, attribute = name.rpartition(".")
    return Layers(pattern, attribute) if dot else Argument(name)


def value_of(axis: Axis, subject: Subject) -> int | None:
    """Return the value of a subject on an axis of whole numbers (of a size its largest dimension); None if not
    known."""
    image, length = _image(subject), _length(subject)
    if isinstance(axis, Size) and image is not None:
        return max(image)
    if isinstance(axis, Length) and length is not None:
        return length
    if isinstance(axis, Batch) and subject.options.batch is not None:
        return subject.options.batch
    names = _BATCH_NAMES if isinstance(axis, Batch) else (axis.name,)
    known = subject.parameters()
    name = next((name for name in names if name in known), None)
    value = subject.arguments.get(name, known[name].default) if name is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _size(name: str, subject: Subject) -> Axis:
    image = _image(subject)
    if image is None and name in subject.parameters():
        return Argument(name)
    return Size(name, 2 if image is None else len(image))


def without_data(subject: Subject) -> Subject:
    """Return the same step with modules and tensors that hold no data: nothing of it is read, and it can be sent
    around."""
    bare = lambda leaf: leaf if isinstance(leaf, Spec) else _bare(leaf)  # noqa: E731
    changed = replace(subject, options=_mapped(subject.options, bare))
    if not isinstance(subject.what, nn.Module):
        return changed
    with torch.device("meta"):
        return replace(changed, what=copy_module(subject.what))


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def whole(value: Any, name: str) -> int:
    """Return a value as a whole number above 0.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} {value!r}", expected="a whole number above 0", do="Give such numbers")
    return value


def number(value: Any) -> float | None:
    """Return a value as a number, None where it is none."""
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)


def _argument_instead(subject: Subject, name: str, value: Any, expected: str) -> Subject:
    """Return the axis as an argument of the callable, where that has one of this name and no input to change."""
    if name in subject.parameters():
        return subject.with_arguments(**{name: value})
    raise InputError(
        f"{subject.title} has no {name} to vary",
        expected=f"{expected}; or a target with an argument named {name}",
        do="Give the input, or vary the argument that stands for it by its name",
    )


def _tensors(subject: Subject) -> list[Any]:
    found: list[Any] = []
    _mapped(subject.options, lambda leaf: found.append(leaf) or leaf, targets=False)
    return found


def _image(subject: Subject) -> tuple[int, ...] | None:
    """Return the spatial dimensions of the first image: a floating-point input of (batch, channels, sizes ...)."""
    for leaf in _tensors(subject):
        if leaf.dtype.is_floating_point and len(leaf.shape) >= 3:
            return tuple(int(size) for size in leaf.shape[2:])
    return None


def _sequence(subject: Subject) -> tuple[int, ...] | None:
    """Return the shape of the first input of integers with a length, else of the first of (batch, length, features).
    Booleans are masks."""
    tensors = _tensors(subject)
    kinds = [(leaf, leaf.dtype.is_floating_point or leaf.dtype == torch.bool) for leaf in tensors]
    found = [leaf for leaf, other in kinds if not other and len(leaf.shape) >= 2]
    found += [leaf for leaf in tensors if len(leaf.shape) == 3]
    return tuple(map(int, found[0].shape)) if found else None


def _length(subject: Subject) -> int | None:
    tokens = _sequence(subject)
    return None if tokens is None else tokens[1]


def _lengthened(shape: tuple[int, ...], tokens: tuple[int, ...], new: int) -> tuple[int, ...]:
    old = tokens[1]
    if shape[-2:] == (old, old) and shape != tokens and len(shape) <= 4:  # a mask for each pair of positions
        return (*shape[:-2], new, new)
    return (shape[0], new, *shape[2:]) if len(shape) >= 2 and shape[1] == old else shape


def _reshaped(options: Any, change: Callable[[tuple[int, ...]], Sequence[int]]) -> Any:
    return _mapped(options, lambda leaf: _with_shape(leaf, tuple(change(tuple(leaf.shape)))))


def _with_shape(leaf: Any, shape: tuple[int, ...]) -> Any:
    if tuple(leaf.shape) == shape:
        return leaf
    if isinstance(leaf, Spec):
        return replace(leaf, shape=shape)
    made = torch.empty(shape, dtype=leaf.dtype, device="meta")
    order = sorted(range(leaf.dim()), key=lambda dim: (-leaf.stride(dim), dim))  # channels last stays channels last
    if order != list(range(leaf.dim())):
        made = torch.empty([shape[dim] for dim in order], dtype=leaf.dtype, device="meta").permute(
            [order.index(dim) for dim in range(leaf.dim())]
        )
    return made.requires_grad_(leaf.requires_grad)


def _converted(leaf: Any, dtype: torch.dtype) -> Any:
    if leaf.dtype != torch.float32:
        return leaf
    if isinstance(leaf, Spec):
        return replace(leaf, dtype=dtype)
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)


def _mapped(options: Any, function: Callable[[Any], Any], *, targets: bool = True) -> Any:
    """Return options with a function applied to every spec and tensor of inputs, keywords and targets."""
    return replace(
        options,
        inputs=_walked(options.inputs, function),
        kwargs=_walked(dict(options.kwargs), function),
        targets=_walked(options.targets, function) if targets else options.targets,
    )


def _walked(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Spec, torch.Tensor)):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _walked(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_walked(item, function) for item in value)
    return value
