"""Ranges of whole numbers: between which a value lies that a recording does not know, so that a size has a largest.

`torch.randint(1, 91, ...)` is at most 90, a mask of 400 elements sums to 400 at most, an index lies within its
dimension. What is computed of such numbers lies within what is computed of their ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Ledger
from memplan.trace.recording.values.range_rules import RULES, RULES_OF_OVERLOADS, Call, Range, Ranges, Rule, union

_READ = 1 << 16
"""Elements of a tensor whose values are read, where they are there to be read."""


class ValueRanges:
    """Follows the smallest and the largest element of storages through the ops of a recording."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._of: dict[int, Range] = {}
        self._rules: dict[str, Rule | None] = {}

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
        return None if entry is None else self._of.get(entry.id)

    def put(self, tensor: torch.Tensor, values: Range | None) -> None:
        """Note between what the elements of a tensor lie; None: nothing is known of them any more."""
        entry = self._ledger.find(tensor)
        if entry is None:
            return
        if values is None or not all(map(math.isfinite, values)):
            self._of.pop(entry.id, None)
        else:
            floating = tensor.is_floating_point()
            self._of[entry.id] = values if floating else (math.floor(values[0]), math.floor(values[1]))

    def before(self, args: tuple[Any, ...], *, written: bool) -> None:
        """Note that an op is about to run; a tensor that it writes may be known until then."""
        target = args[0] if written and args and not self._ledger.real else None
        if isinstance(target, _torch.FakeTensor) and target.constant is not None:
            self.put(target, self.of(target))

    def after(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, *, written: bool) -> None:
        """Note that an op has run; ``written``: it changed its first argument."""
        if self._ledger.real:
            return
        rule = self._rule(name)
        call = Call(name, args, kwargs, result, self.of)
        if written:
            self._written(args[0] if args else None, rule, call)
        elif rule is not None:
            self._made(rule, call)

    def _rule(self, name: str) -> Rule | None:
        if name not in self._rules:
            base = name.split(".")[1] if "." in name else name
            self._rules[name] = RULES_OF_OVERLOADS.get(name, RULES.get(base))
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

    def _written(self, target: Any, rule: Rule | None, call: Call) -> None:
        for one in target if isinstance(target, (list, tuple)) else [target]:
            if not isinstance(one, torch.Tensor) or one.layout != torch.strided:
                continue
            entry = self._ledger.find(one)
            if entry is None:
                continue
            before = self._of.get(entry.id)
            if before is None and rule is None:
                continue
            values = _by(rule, call) if rule is not None and one is target else None
            whole = one.numel() * one.element_size() == one.untyped_storage().nbytes()
            if isinstance(values, list):
                values = values[0]
            self.put(one, values if whole else union([before, values]))


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
