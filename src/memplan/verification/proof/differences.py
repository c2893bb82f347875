"""Measure how far two tensors, or two outputs, differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memplan._display import Printed
from memplan._json import Measured
from memplan.trace.structure import TENSOR, Holder, Structure, take_apart

NOTHING = 100.0
"""Ratio of error and norm from which on a tensor counts as zero in exact arithmetic, so that the ratio says nothing.
(The gradient of a bias before a normalisation.)"""


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
    """Tensors that differ in a bit."""

    @property
    def equal(self) -> bool:
        """Return whether all were the same, bit for bit."""
        return not self.differences


def difference(name: str, step: int, reference: Any, candidate: Any, *, layout: bool = False) -> Difference | None:
    """Describe how two tensors differ; None where they are the same bit for bit, or both are None.

    ``layout``: compare strides, too; those of a copy of the reference are as good.
    """
    if reference is None and candidate is None:
        return None
    if reference is None or candidate is None:
        return Difference(name, step, "is missing" if candidate is None else "is there, without one in the reference")
    for what in ("shape", "dtype", "device"):
        one, other = getattr(reference, what), getattr(candidate, what)
        if one != other:
            return Difference(name, step, f"has the {what} {_said(other)}, not {_said(one)}")
    reference, candidate = reference.detach(), candidate.detach()
    if layout and _strides(candidate) not in (_strides(reference), _strides_of_copy(reference)):
        return Difference(name, step, f"has the strides {candidate.stride()}, not {reference.stride()}")
    if torch.equal(_bits(reference), _bits(candidate)):
        return None
    return _numeric(name, step, reference, candidate)


def output_differences(step: int, reference: Any, candidate: Any) -> tuple[int, list[Difference]]:
    """Compare the tensors of two outputs, inside of any objects; return how many there are, and the differences."""
    (tensors, one), (others, other) = take_apart(reference), take_apart(candidate)
    if _form(one) != _form(other):
        return 1, [Difference("the output", step, f"is put together as {_form(other)}, not as {_form(one)}"[:400])]
    ours, theirs = list(_leaves(one, iter(tensors))), list(_leaves(other, iter(others)))
    found: list[Difference | None] = []
    for name, mine, its in zip(_output_names(len(ours)), ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
            found.append(difference(name, step, mine, its, layout=True))
        elif isinstance(mine, torch.Tensor) or isinstance(its, torch.Tensor) or not _same(mine, its):
            found.append(Difference(name, step, _told(mine, its)))
    return len(ours), [one for one in found if one is not None]


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an output, by the names that differences have."""
    tensors, structure = take_apart(output)
    leaves = list(_leaves(structure, iter(tensors)))
    named = zip(_output_names(len(leaves)), leaves, strict=True)
    return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}


def _output_names(number: int) -> list[str]:
    return ["the output"] if number == 1 else [f"output {at}" for at in range(number)]


def _form(structure: Structure) -> Any:
    """Return the structure of an output, with the classes of the objects that hold its tensors."""
    inside = tuple((type(one.shell), _form(one.inside)) for one in structure.leaves if isinstance(one, Holder))
    return (structure.spec, inside) if inside else structure.spec


def _leaves(structure: Structure, tensors: Iterator[torch.Tensor]) -> Iterator[Any]:
    """Yield everything in an output: tensors, other values, and the objects that hold tensors, without these."""
    for leaf in structure.leaves:
        if isinstance(leaf, Holder):
            yield leaf.shell
            yield from _leaves(leaf.inside, tensors)
        else:
            yield next(tensors) if leaf is TENSOR else leaf


def _same(one: Any, two: Any, above: tuple[int, ...] = ()) -> bool:
    """Return whether two non-tensor values are equal, or objects of one class with equal content: few classes define
    when their objects are equal."""
    if one is two or id(one) in above:
        return True
    if type(one) is not type(two):
        return False
    try:
        if bool(one == two):
            return True
    except Exception:  # __eq__ is the user's and can do anything
        pass
    if callable(one):
        return False
    ours, theirs = _content(one), _content(two)
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        return False
    return all(_same(part, theirs[key], (*above, id(one))) for key, part in ours.items())


def _told(one: Any, two: Any) -> str:
    """Describe the first difference between two non-tensor values."""
    ours, theirs = (_content(one), _content(two)) if type(one) is type(two) else (None, None)
    if ours and theirs and ours.keys() == theirs.keys():
        plain = (key for key, part in ours.items() if _content(part) is None)
        apart = next((key for key in plain if not _same(ours[key], theirs[key])), None)
        if apart is not None:
            place = f"the {apart:.40}" if isinstance(apart, str) else f"at {apart!r:.40}"
            return f"has {place} {theirs[apart]!r:.60}, not {ours[apart]!r:.60}"
    return f"is {two!r:.60}, not {one!r:.60}"


def _content(value: Any) -> dict[Any, Any] | None:
    """Return the content of a container or an object; None for other values."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    found = dict(value) if isinstance(value, dict) else {}
    if dataclasses.is_dataclass(value):  # which may have slots
        found |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return found | vars(value) if hasattr(value, "__dict__") else found or None


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _strides_of_copy(tensor: torch.Tensor) -> list[int]:
    """Return the strides of a copy, which has no gaps: an output that looks into another one comes as a copy."""
    return _strides(torch.empty_like(tensor, device="meta"))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: unlike numbers, a nan is equal to itself and -0 is not 0."""
    return _dense(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _numeric(name: str, step: int, reference: torch.Tensor, candidate: torch.Tensor) -> Difference:
    wide = torch.complex128 if reference.is_complex() else torch.float64
    one, two = _dense(reference).to(wide), _dense(candidate).to(wide)
    apart = (two - one).abs()
    largest = float(apart.max())
    norm = float(one.abs().norm())
    relative = float(apart.norm()) / norm if norm else float("inf") if largest else 0.0
    beside = f"relative {relative:.3g}, in L2" if relative < NOTHING else f"and should be {norm:.3g}, in L2"
    return Difference(name, step, f"differs by up to {largest:.3g} ({beside})", largest, relative)


def _said(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
