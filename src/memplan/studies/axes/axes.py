"""Axes of a study: each sets a subject to a value, such as a batch size or a precision."""

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
from memplan.trace.spec import Spec, map_leaves
from memplan.trace.step import copy_module

PRECISIONS: Mapping[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16-true": (None, torch.bfloat16),
    "fp16-true": (None, torch.float16),
}
"""(autocast dtype, dtype of weights and inputs) by name."""

_BATCH_NAMES = ("batch", "batch_size")


class Axis(Protocol):
    """A property of a step with a value at each point of a study."""

    @property
    def name(self) -> str:
        """Name of the axis in rows."""
        ...

    @property
    def unit(self) -> str:
        """Unit of its measure: ``sample``, ``voxel``; else the name of the axis."""
        ...

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with this value. Raises InputError if the subject has no such axis, or the axis no such
        value."""
        ...

    def measure(self, value: Any) -> float | None:
        """Return the number that bytes grow with at this value; None if the value is not a number."""
        ...


@dataclass(frozen=True)
class Batch:
    """The leading dimension of inputs and targets, or the callable's argument ``batch`` or ``batch_size``."""

    name: str = "batch"
    unit: str = "sample"

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with this batch size. Raises InputError without a batch."""
        size = positive_integer(value, self.name)
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
        """Return the batch size."""
        return float(value)


@dataclass(frozen=True)
class Size:
    """The spatial dimensions of image inputs, and of all inputs and targets that share them.

    A value is a number for all of them, or one for each: ``"96x96x48"``, ``(96, 96, 48)``.
    """

    name: str = "size"
    dims: int = 2
    """Number of spatial dimensions."""
    aspect: tuple[float, ...] | None = None
    """Factors of a single number, for each dimension."""
    divisible: int = 1
    """Multiple to which sizes are rounded down after applying ``aspect``."""

    @property
    def unit(self) -> str:
        """``pixel`` of two dimensions; ``position`` of one, ``voxel`` of three."""
        return {1: "position", 2: "pixel"}.get(self.dims, "voxel")

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with images of this size. Raises InputError without an image."""
        sizes = self.sizes(value)
        options = subject.options
        current = _image(subject)
        if current is None:
            return _with_argument(subject, self.name, value, "an image among its inputs: 1x3x224x224, 1x1x96x96x96")
        dims = len(current)

        def change(shape: tuple[int, ...]) -> tuple[int, ...]:
            return (*shape[:-dims], *sizes) if shape[-dims:] == current else shape

        return replace(subject, options=_with_shapes(options, change))

    def sizes(self, value: Any) -> tuple[int, ...]:
        """Return the spatial dimensions at a value. Raises InputError: not a positive integer, or not one for each
        dimension."""
        if isinstance(value, str) and "x" in value:
            numbers = {part: whole_number(part.strip()) for part in value.split("x")}  # None: refused below
            value = tuple(part if numbers[part] is None else numbers[part] for part in value.split("x"))
        if isinstance(value, (list, tuple)):
            if len(value) != self.dims:
                raise InputError(
                    f"{self.name} {'x'.join(map(str, value))} has {len(value)} dimensions",
                    expected=f"{self.dims}, as the input has",
                    do="Give one for each, or one number for all",
                )
            return tuple(positive_integer(part, self.name) for part in value)
        size = positive_integer(value, self.name)
        if self.aspect is None:
            return (size,) * self.dims
        step = self.divisible
        # 1e-9: a product such as 100 * 0.29 may lie just below a whole number
        return tuple(max(step, int(size * share + 1e-9) // step * step) for share in self.aspect)

    def measure(self, value: Any) -> float | None:
        """Return the number of pixels or voxels."""
        return float(math.prod(self.sizes(value)))


@dataclass(frozen=True)
class Length:
    """The length of sequences: dimension 1 of token inputs, or of (batch, length, features), and of what shares it."""

    name: str = "sequence"
    unit: str = "token"

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with sequences of this length. Raises InputError without a sequence."""
        length = positive_integer(value, self.name)
        tokens = _sequence(subject)
        if tokens is None:
            return _with_argument(subject, self.name, value, "a sequence among its inputs: 8x1024:int64<50257")
        options = _with_shapes(subject.options, lambda shape: _with_length(shape, tokens, length))
        return replace(subject, options=options)

    def measure(self, value: Any) -> float | None:
        """Return the length."""
        return float(value)


@dataclass(frozen=True)
class Precision:
    """``fp32``, ``bf16``, ``fp16`` (autocast), ``bf16-true``, ``fp16-true`` (weights and inputs converted)."""

    name: str = "precision"
    unit: str = "precision"

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject in this precision. Raises InputError for an unknown precision."""
        if value not in PRECISIONS:
            raise InputError(f"precision {value!r}", expected=f"one of {', '.join(PRECISIONS)}", do="Choose one")
        autocast, dtype = PRECISIONS[value]
        options = replace(subject.options, autocast=autocast, dtype=dtype)
        if dtype is None:
            return replace(subject, options=options)
        return replace(subject, options=_map_tensors(options, lambda leaf: _with_dtype(leaf, dtype)))

    def measure(self, value: Any) -> float | None:
        """Return None: a precision is not a number."""
        return None


@dataclass(frozen=True)
class Argument:
    """An argument of the callable that makes the model or the step."""

    name: str

    @property
    def unit(self) -> str:
        """Unit of the axis in messages and tables: the argument's own name, as its values have none."""
        return self.name

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with this argument of its callable. Raises InputError if that takes no such argument."""
        parameters = subject.parameters()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if self.name not in named and not takes_any:
            near = difflib.get_close_matches(self.name, [*_NAMED_AXES, *named], n=3)
            raise InputError(
                f"{subject.title} has no argument {self.name!r}",
                expected=f"{', '.join(_NAMED_AXES)}"
                + f", or one of its arguments: {', '.join(named[:10])}" * bool(named),
                do=f"Did you mean {' or '.join(near)}?" if near else "Vary another, or name a callable that takes it",
            )
        return subject.with_arguments(**{self.name: value})

    def measure(self, value: Any) -> float | None:
        """Return the argument if it is a number, else None."""
        return as_float(value)


@dataclass(frozen=True)
class Layers:
    """An attribute of the layers whose names match a pattern: ``encoder.*.kernel_size``."""

    pattern: str
    attribute: str

    @property
    def name(self) -> str:
        """Pattern and attribute: ``encoder.*.kernel_size``."""
        return f"{self.pattern}.{self.attribute}"

    @property
    def unit(self) -> str:
        """Name of the attribute."""
        return self.attribute

    def at(self, subject: Subject, value: Any) -> Subject:
        """Return the subject with this attribute in the layers. Only when the model is made it shows whether there are
        any."""
        change = LayerChange(self.pattern, self.attribute, value)
        return replace(subject, changes=(*subject.changes, change))

    def measure(self, value: Any) -> float | None:
        """Return the attribute if it is a number, else None."""
        return as_float(value)


_NAMED_AXES: dict[str, Callable[[Subject], Axis]] = {
    "batch": lambda _: Batch(),
    "size": lambda subject: _size_axis("size", subject),
    "patch": lambda subject: _size_axis("patch", subject),
    "sequence": lambda _: Length(),
    "precision": lambda _: Precision(),
}


def axis_of(name: str, subject: Subject) -> Axis:
    """Return the axis of this name.

    A name is ``batch``, ``size``, ``patch``, ``sequence``, ``precision``, ``LAYERS.attribute``, or an argument of the
    callable.
    """
    if name in _NAMED_AXES:
        return _NAMED_AXES[name](subject)
    pattern, dot, attribute = name.rpartition(".")
    return Layers(pattern, attribute) if dot else Argument(name)


def value_of(axis: Axis, subject: Subject) -> int | None:
    """Return a subject's current value on an axis of integers, None if unknown.

    It comes from the inputs or options, else from the callable's argument of this name. The value of an image's size is
    its largest dimension.
    """
    image, sequence = _image(subject), _sequence(subject)
    if isinstance(axis, Size) and image is not None:
        return max(image)
    if isinstance(axis, Length) and sequence is not None:
        return sequence[1]  # (batch, length, ...)
    if isinstance(axis, Batch) and subject.options.batch is not None:
        return subject.options.batch
    parameters = subject.parameters()
    for name in _BATCH_NAMES if isinstance(axis, Batch) else (axis.name,):
        if name in parameters:
            value = subject.arguments.get(name, parameters[name].default)
            return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
    return None


def _size_axis(name: str, subject: Subject) -> Axis:
    """Return the axis of the image's size; without an image, that of the callable's argument of this name."""
    image = _image(subject)
    if image is None and name in subject.parameters():
        return Argument(name)
    return Size(name, 2 if image is None else len(image))


def without_data(subject: Subject) -> Subject:
    """Return the same step with its module and tensors on the meta device, so that it is small to pickle."""
    changed = replace(subject, options=_map_tensors(subject.options, _on_meta))
    if not isinstance(subject.what, nn.Module):
        return changed
    with torch.device("meta"):
        return replace(changed, what=copy_module(subject.what))


def _on_meta(leaf: Spec | torch.Tensor) -> Spec | torch.Tensor:
    """Return a tensor without data, with the same strides and ``requires_grad``; specs are returned unchanged."""
    if isinstance(leaf, Spec):
        return leaf
    tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return tensor.requires_grad_(leaf.requires_grad)


def positive_integer(value: Any, name: str) -> int:
    """Return the value of axis ``name`` if it is a positive integer. Raises InputError if it is not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} {value!r}", expected="a whole number above 0", do="Give such numbers")
    return value


def as_float(value: Any) -> float | None:
    """Return a value as a float, or None if it is not a number."""
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)


def _with_argument(subject: Subject, name: str, value: Any, expected: str) -> Subject:
    """Return the subject with the callable's argument ``name``. Raises InputError if it has none.

    For subjects without an input to change. ``expected``: such an input, for the error.
    """
    if name in subject.parameters():
        return subject.with_arguments(**{name: value})
    raise InputError(
        f"{subject.title} has no {name} to vary",
        expected=f"{expected}; or a target with an argument named {name}",
        do="Give the input, or vary the argument that stands for it by its name",
    )


def _tensors(subject: Subject) -> list[Any]:
    """Return the specs and tensors among inputs and keyword arguments."""
    leaves: list[Any] = []

    def collect(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    _map_tensors(subject.options, collect, targets=False)  # only for what `collect` sees
    return leaves


def _image(subject: Subject) -> tuple[int, ...] | None:
    """Return the spatial dimensions of the first image: a floating-point input of (batch, channels, sizes ...)."""
    for leaf in _tensors(subject):
        if leaf.dtype.is_floating_point and len(leaf.shape) >= 3:
            return tuple(int(size) for size in leaf.shape[2:])
    return None


def _sequence(subject: Subject) -> tuple[int, ...] | None:
    """Return the shape of the first sequence: an integer input of (batch, length, ...), else any input of (batch,
    length, features)."""
    leaves = _tensors(subject)
    integers = [leaf for leaf in leaves if not leaf.dtype.is_floating_point and leaf.dtype != torch.bool]
    sequences = [leaf for leaf in integers if len(leaf.shape) >= 2]
    sequences += [leaf for leaf in leaves if len(leaf.shape) == 3]
    return tuple(map(int, sequences[0].shape)) if sequences else None


def _with_length(shape: tuple[int, ...], tokens: tuple[int, ...], new: int) -> tuple[int, ...]:
    """Return a shape with another sequence length, in dimension 1 or in both dimensions of a mask.

    ``tokens``: shape of the sequence, whose dimension 1 is the present length.
    """
    old = tokens[1]
    if shape[-2:] == (old, old) and shape != tokens and len(shape) <= 4:  # a mask for each pair of positions
        return (*shape[:-2], new, new)
    return (shape[0], new, *shape[2:]) if len(shape) >= 2 and shape[1] == old else shape


def _with_shapes(options: Any, change: Callable[[tuple[int, ...]], Sequence[int]]) -> Any:
    """Return options whose specs and tensors have the shapes that ``change`` returns for theirs."""
    return _map_tensors(options, lambda leaf: _with_shape(leaf, tuple(change(tuple(leaf.shape)))))


def _with_shape(leaf: Any, shape: tuple[int, ...]) -> Any:
    """Return a spec or tensor with another shape; a tensor is then on the meta device, in the same memory format."""
    if tuple(leaf.shape) == shape:
        return leaf
    if isinstance(leaf, Spec):
        return replace(leaf, shape=shape)
    tensor = torch.empty(shape, dtype=leaf.dtype, device="meta")
    order = sorted(range(leaf.dim()), key=lambda dim: (-leaf.stride(dim), dim))  # channels last stays channels last
    if order != list(range(leaf.dim())):
        tensor = torch.empty([shape[dim] for dim in order], dtype=leaf.dtype, device="meta").permute(
            [order.index(dim) for dim in range(leaf.dim())]
        )
    return tensor.requires_grad_(leaf.requires_grad)


def _with_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    """Return a float32 spec or tensor converted to a dtype; others are returned unchanged."""
    if leaf.dtype != torch.float32:
        return leaf
    if isinstance(leaf, Spec):
        return replace(leaf, dtype=dtype)
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)


def _map_tensors(options: Any, function: Callable[[Any], Any], *, targets: bool = True) -> Any:
    """Return options with a function applied to every spec and tensor of inputs, keyword arguments and targets."""
    return replace(
        options,
        inputs=map_leaves(options.inputs, function),
        kwargs=map_leaves(dict(options.kwargs), function),
        targets=map_leaves(options.targets, function) if targets else options.targets,
    )
