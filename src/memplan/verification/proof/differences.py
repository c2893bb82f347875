"""Measure how far two tensors, or two outputs, differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memplan._display import Printed
from memplan._json import Measured
from memplan.trace.structure import TENSOR, Holder, Structure, take_apart

NEAR_ZERO = 100.0
"""Ratio of error to norm above which a tensor counts as zero in exact arithmetic, and the ratio is not reported. An
example is the gradient of a bias before a normalisation."""


@dataclass(frozen=True, slots=True)
class Difference(Printed):
    """A tensor that differs."""

    name: str
    step: int
    """Number of the compared step, counted from 0."""
    what: str
    """Description in words."""
    max_abs: Measured | None = None
    """Largest difference of an element; None where the tensors cannot be subtracted."""
    relative: Measured | None = None
    """Norm (L2) of the difference over that of the reference."""

    def __str__(self) -> str:
        return f"{self.name} {self.what} in step {self.step + 1}"


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of all tensors of a kind, over all steps."""

    tensors: int = 0
    """Number of comparisons."""
    differences: tuple[Difference, ...] = ()
    """Tensors whose bits differ."""

    @property
    def equal(self) -> bool:
        """Return whether all tensors were the same, bit for bit."""
        return not self.differences


def difference(name: str, step: int, reference: Any, candidate: Any, *, layout: bool = False) -> Difference | None:
    """Describe how two tensors differ. Return None where they are the same bit for bit, or both are None.

    ``layout``: compare strides, too; those of a contiguous copy of the reference count as equal.
    """
    if reference is None and candidate is None:
        return None
    if reference is None or candidate is None:
        return Difference(name, step, "is missing" if candidate is None else "is there, without one in the reference")
    for what in ("shape", "dtype", "device"):
        expected, actual = getattr(reference, what), getattr(candidate, what)
        if expected != actual:
            return Difference(name, step, f"has the {what} {_short_text(actual)}, not {_short_text(expected)}")
    reference, candidate = reference.detach(), candidate.detach()
    if layout:
        copied = torch.empty_like(reference, device="meta")  # a view can come out as a copy, without gaps
        if _strides(candidate) not in (_strides(reference), _strides(copied)):
            return Difference(name, step, f"has the strides {candidate.stride()}, not {reference.stride()}")
    if torch.equal(_raw_bytes(reference), _raw_bytes(candidate)):
        return None
    return _numeric_difference(name, step, reference, candidate)


def output_differences(step: int, reference: Any, candidate: Any) -> tuple[int, list[Difference]]:
    """Compare all values in two outputs, also inside of objects. Return the number of values, and the differences."""
    (tensors, structure), (other_tensors, other_structure) = take_apart(reference), take_apart(candidate)
    expected, actual = _structure_with_classes(structure), _structure_with_classes(other_structure)
    if expected != actual:
        return 1, [Difference("the output", step, f"is put together as {actual}, not as {expected}"[:400])]
    leaves = list(_leaves(structure, iter(tensors)))
    other_leaves = list(_leaves(other_structure, iter(other_tensors)))
    differences: list[Difference | None] = []
    for name, leaf, other in zip(_output_names(len(leaves)), leaves, other_leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            differences.append(difference(name, step, leaf, other, layout=True))
        elif isinstance(leaf, torch.Tensor) or isinstance(other, torch.Tensor) or not _equal_values(leaf, other):
            differences.append(Difference(name, step, _value_difference(leaf, other)))
    return len(leaves), [item for item in differences if item is not None]


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an output by name, as `Difference` names them."""
    tensors, structure = take_apart(output)
    leaves = list(_leaves(structure, iter(tensors)))
    named = zip(_output_names(len(leaves)), leaves, strict=True)
    return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}


def _output_names(number: int) -> list[str]:
    """Return the names of the values in an output, of which there are ``number``."""
    return ["the output"] if number == 1 else [f"output {index}" for index in range(number)]


def _structure_with_classes(structure: Structure) -> Any:
    """Return pytree's spec of an output, and the class and structure of each object in it that contains tensors."""
    holders = [leaf for leaf in structure.leaves if isinstance(leaf, Holder)]
    objects = tuple((type(holder.shell), _structure_with_classes(holder.inside)) for holder in holders)
    return (structure.spec, objects) if objects else structure.spec


def _leaves(structure: Structure, tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
    """Yield all values in an output: tensors, other values, and objects, each followed by the tensors in it.
    ``tensors``: those of the output, in order; `take_apart` removed them from the structure."""
    for leaf in structure.leaves:
        if isinstance(leaf, Holder):
            yield leaf.shell
            yield from _leaves(leaf.inside, tensors)
        else:
            yield next(tensors) if leaf is TENSOR else leaf


def _equal_values(a: Any, b: Any, parents: tuple[int, ...] = ()) -> bool:
    """Return whether two non-tensor values are equal.

    Objects of the same class are equal if their attributes are, since few classes define ``__eq__``. ``parents``: ids
    of the objects that contain ``a``: objects may contain themselves.
    """
    if a is b or id(a) in parents:
        return True
    if type(a) is not type(b):
        return False
    try:
        if bool(a == b):
            return True
    except Exception:  # __eq__ is the user's and can do anything
        pass
    if callable(a):
        return False
    content, other = _items_or_attributes(a), _items_or_attributes(b)
    if content is None or other is None or content.keys() != other.keys():
        return False
    return all(_equal_values(value, other[key], (*parents, id(a))) for key, value in content.items())


def _value_difference(expected: Any, actual: Any) -> str:
    """Describe how two non-tensor values differ: in their first differing item or attribute, else as a whole."""
    if type(expected) is type(actual):
        content, other = _items_or_attributes(expected), _items_or_attributes(actual)
        if content and other and content.keys() == other.keys():
            for key, value in content.items():
                has_parts = _items_or_attributes(value) is not None
                if not has_parts and not _equal_values(value, other[key]):
                    item = f"the {key:.40}" if isinstance(key, str) else f"at {key!r:.40}"
                    return f"has {item} {other[key]!r:.60}, not {value!r:.60}"
    return f"is {actual!r:.60}, not {expected!r:.60}"


def _items_or_attributes(value: Any) -> dict[Any, Any] | None:
    """Return the items of a container or the attributes of an object; None for other values."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    content = dict(value) if isinstance(value, dict) else {}
    if dataclasses.is_dataclass(value):  # which may have slots
        content |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "__dict__"):
        return content | vars(value)
    return content or None


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: compared as bytes, a nan is equal to itself and -0 is not 0."""
    return _dense(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor as a dense tensor; others unchanged."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _numeric_difference(name: str, step: int, reference: torch.Tensor, candidate: torch.Tensor) -> Difference:
    """Describe by how much tensors of the same shape and dtype differ: in the largest element and in L2."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    expected = _dense(reference).to(wide)
    error = (_dense(candidate).to(wide) - expected).abs()
    largest = float(error.max())
    norm = float(expected.abs().norm())
    relative = relative_error(float(error.norm()), norm)
    scale = f"relative {relative:.3g}, in L2" if relative < NEAR_ZERO else f"and should be {norm:.3g}, in L2"
    return Difference(name, step, f"differs by up to {largest:.3g} ({scale})", largest, relative)


def relative_error(error: float, norm: float) -> float:
    """Return an error as a share of a norm; of a norm of 0, 0 for no error, else infinity."""
    if norm:
        return error / norm
    return 0.0 if error == 0 else math.inf


def _short_text(value: Any) -> str:
    """Return the text of a shape, dtype or device: ``(8, 64)``, ``float32``."""
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
