"""Ranges of whole numbers: between which a value lies that a recording does not know, so that a size has a largest.

`torch.randint(1, 91, ...)` is at most 90, a mask of 400 elements sums to 400 at most, an index lies within its
dimension. What is computed of such numbers lies within what is computed of their ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.recording.values.intervals import Range, union
from memplan.trace.recording.values.range_rules import RULES, RULES_OF_OVERLOADS, Call, Ranges, Rule

_SHIFTS = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1}
_READ = 1 << 16
"""Elements of a tensor whose values are read, where they are there to be read."""


class ValueRanges:
    """Follows the smallest and the largest element of storages through the ops of a recording."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._of: dict[int, tuple[Range, torch.dtype]] = {}
        self._rules: dict[str, Rule | None] = {}
        self._shifted: dict[int, tuple[tuple[int, int, int], int]] = {}
        """Storage -> the element that its first is computed from, and the number that was added to it."""
        self._writes: dict[int, int] = {}

    def of(self, tensor: torch.Tensor) -> Range | None:
        """Return between what the elements of a tensor lie; None where nothing is known."""
        if tensor.dtype is torch.bool:
            return 0, 1
        if tensor.is_complex() or tensor.layout != torch.strided or not _torch.has_shape(tensor):
            return None
        known = tensor.constant if isinstance(tensor, _torch.FakeTensor) else tensor
        if known is not None:
            return _ends(known) if known.numel() <= _READ and not known.is_floating_point() else None
        entry = self._ledger.find(tensor)
        found = None if entry is None else self._of.get(entry.id)
        return found[0] if found is not None and found[1] is tensor.dtype else None  # else its bits are seen anew

    def origin(self, tensor: torch.Tensor) -> tuple[tuple[int, int, int], int] | None:
        """Return the element that a tensor of one was computed from, and the number that was added to it.

        Two that have the same element differ by what their numbers do, whatever its value. None: not of one element.
        """
        entry = self._ledger.find(tensor) if tensor.layout == torch.strided and tensor.numel() == 1 else None
        if entry is None:
            return None
        (storage, offset, writes), number = self._shifted.get(entry.id, ((entry.id, 0, self._of_writes(entry.id)), 0))
        return (storage, offset + int(tensor.storage_offset()), writes), number

    def _of_writes(self, storage: int) -> int:
        return self._writes.get(storage, 0)

    def _shift(self, call: Call) -> None:
        """Note that a whole number is added to whole numbers: each element of the result comes from one."""
        if call.name not in _SHIFTS or call.kwargs or not isinstance(call.args[0], torch.Tensor):
            return
        (x, number), result = call.args[:2], call.result
        if type(number) is not int or result.is_floating_point() or not (x.is_contiguous() and result.is_contiguous()):
            return
        source, made = self._ledger.find(x), self._ledger.find(result)
        if source is not None and made is not None:
            first = (source.id, int(x.storage_offset()), self._of_writes(source.id))
            (storage, offset, writes), before = self._shifted.get(source.id, (first, 0))
            offset = offset + first[1] if source.id in self._shifted else offset
            self._shifted[made.id] = (storage, offset, writes), before + _SHIFTS[call.name] * number

    def put(self, tensor: torch.Tensor, values: Range | None) -> None:
        """Note between what the elements of a tensor lie; None: nothing is known of them any more."""
        entry = self._ledger.find(tensor)
        if entry is None:
            return
        held = None if values is None else _held(values, tensor.dtype)
        if held is None:
            self._of.pop(entry.id, None)
        else:
            self._of[entry.id] = held, tensor.dtype

    def before(self, written: Sequence[Any]) -> None:
        """Note that an op is about to run; the tensors that it writes may be known until then."""
        for target in written if not self._ledger.real else ():
            if isinstance(target, _torch.FakeTensor) and target.constant is not None:
                self.put(target, self.of(target))

    def after(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        written: Sequence[Any] = (),
    ) -> None:
        """Note that an op has run; ``written``: arguments that it changed."""
        if self._ledger.real:
            return
        rule = self._rule(name)
        call = Call(name, args, kwargs, result, self.of)
        if written:
            self._written(written, rule, call)
        elif rule is not None:
            self._made(rule, call)
            self._shift(call)

    def _rule(self, name: str) -> Rule | None:
        if name not in self._rules:
            self._rules[name] = rule_of(name)
        return self._rules[name]

    def _made(self, rule: Rule, call: Call) -> None:
        values = _by(rule, call)
        if values is None:
            return
        if isinstance(call.result, torch.Tensor):
            self.put(call.result, values[0] if isinstance(values, list) else values)
        elif isinstance(values, list) and isinstance(call.result, (list, tuple)):
            for tensor, one in zip(call.result, values, strict=False):
                if isinstance(tensor, torch.Tensor):
                    self.put(tensor, one)

    def _written(self, targets: Sequence[Any], rule: Rule | None, call: Call) -> None:
        values = _by(rule, call) if rule is not None else None
        several = values if isinstance(values, list) else [values]
        for number, target in enumerate(targets):
            known = several[number] if number < len(several) and len(targets) in (1, len(several)) else None
            for one in target if isinstance(target, (list, tuple)) else [target]:
                if isinstance(one, torch.Tensor) and one.layout == torch.strided:
                    self._overwritten(one, known if one is target else None)

    def _overwritten(self, tensor: torch.Tensor, values: Range | None) -> None:
        """A part of a storage is written: the rest of it is as before."""
        entry = self._ledger.find(tensor)
        if entry is None:
            return
        self._shifted.pop(entry.id, None)
        self._writes[entry.id] = self._of_writes(entry.id) + 1
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        self.put(tensor, values if whole else union([self.of(tensor), values]))


def rule_of(name: str) -> Rule | None:
    """Return the rule of an op, given its name with its overload; None where it may give anything.

    Of the forms that write their result into ``out=``, the one without another overload has the plain op's arguments.
    """
    _, base, overload = name.split(".") if name.count(".") == 2 else ("", name, "")
    plain = not overload.endswith("out") or overload == "out"
    return RULES_OF_OVERLOADS.get(name, RULES.get(base) if plain else None)


def _held(values: Range, dtype: torch.dtype) -> Range | None:
    """Return between what values lie that are stored in a dtype: a cast truncates toward zero, or wraps around; one to
    floating point rounds, which keeps the order."""
    if not all(map(math.isfinite, values)):
        return None
    if dtype.is_floating_point:
        with _torch.no_modes():
            low, high = torch.tensor(values, dtype=torch.float64).to(dtype).tolist()
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    if dtype.is_complex or dtype is torch.bool:
        return values
    low, high, limits = math.trunc(values[0]), math.trunc(values[1]), torch.iinfo(dtype)
    return (low, high) if limits.min <= low and high <= limits.max else None


def _by(rule: Rule, call: Call) -> Ranges:
    try:
        return rule(call)
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError):
        return None  # a form of its arguments that the rule is not made for


def _ends(known: torch.Tensor) -> Range | None:
    if not known.numel():
        return None
    with _torch.no_modes(), torch.no_grad():
        low, high = known.min().item(), known.max().item()
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None
