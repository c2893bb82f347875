"""Capture calls that differ only in sizes once, with symbols for the sizes.

The second call of a kind is traced with symbols for the sizes in which it differs from the first. Graphs of later calls
are derived by substituting numbers, unless torch's guards fail for their sizes: then the call is captured by itself.
(In torch 2.11 they fail for every size of a network with attention on the CPU, which specializes the sizes.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from memplan import _torch
from memplan.planning.capture.capture import Captured, SymbolicError, capture, capture_symbolic, read
from memplan.planning.capture.flat_call import Call, Flat
from memplan.planning.capture.reads.readable import Reads
from memplan.planning.graph.precision import EXACT, Precision

_log = logging.getLogger("memplan")

Sizes = tuple[tuple[int, ...], ...]
"""The shapes of a call's tensors."""


@dataclass(frozen=True)
class Template:
    """A captured call with symbols for sizes."""

    symbolic: _torch.Symbolic
    flat: Flat
    reads: Reads
    precision: Precision = EXACT
    channels_last: bool = False

    def at(self, call: Call) -> Captured | None:
        """Return the captured call; None if its sizes, or values that Python code reads, lead to another graph."""
        joint = self.symbolic.at(call.tensors) if self.reads.are_unchanged() else None
        if joint is None:
            return None
        captured = read(joint, self.flat, call, precision=self.precision)
        return replace(captured, channels_last=self.channels_last, reads=self.reads)


class _SizeFamily:
    """Calls that differ only in sizes, and their template."""

    def __init__(self) -> None:
        self.seen: list[Sizes] = []
        """Sizes of the calls so far."""
        self.template: Template | None = None
        """Graph with symbols for sizes; None if there is none yet."""
        self.varying: list[frozenset[int]] = []
        """Dimensions that are symbols in the template, by tensor."""


class Shapes:
    """Captures calls of a module, with symbols for sizes if possible. ``kind`` returns a key of the call and the state
    of the module that does not depend on sizes; ``precision`` and ``channels_last`` are as for `capture`."""

    def __init__(
        self, module: nn.Module, kind: Callable[[Call], Hashable], precision: Precision = EXACT, *,
        channels_last: bool = False,
    ) -> None:  # fmt: skip
        self._module, self._kind_of, self._precision, self._channels_last = module, kind, precision, channels_last
        self._families: dict[Hashable, _SizeFamily] = {}

    def record_sizes(self, call: Call) -> None:
        """Record the sizes of a call that is captured elsewhere."""
        self._family_of(call).seen.append(_sizes(call))

    def capture(self, call: Call) -> Captured:
        """Capture a call as `capture` does, or derive its graph from the template of calls of other sizes."""
        family = self._family_of(call)
        captured = None if family.template is None else family.template.at(call)
        if captured is None and self._update_template(family, call) and family.template is not None:
            captured = family.template.at(call)
        family.seen.append(_sizes(call))
        if captured is not None:
            return captured
        return capture(self._module, call, self._precision, channels_last=self._channels_last)

    def _family_of(self, call: Call) -> _SizeFamily:
        """Return the record of the calls from which this call differs at most in sizes; a new one if there are none."""
        metadata = tuple((t.dim(), t.dtype, t.device, t.requires_grad) for t in call.tensors)
        return self._families.setdefault((self._kind_of(call), metadata, call.aliases), _SizeFamily())

    def _update_template(self, family: _SizeFamily, call: Call) -> bool:
        """Trace a new template if more sizes vary with this call, or if Python values that the old template depends on
        have changed. Return whether there is a new template: False also if the call cannot be traced with symbols."""
        varying = _varying_dimensions([*family.seen, _sizes(call)])
        unchanged = varying == family.varying and (family.template is None or family.template.reads.are_unchanged())
        if unchanged or not any(varying) or not _can_use_symbols(call, family.seen, varying):
            return False
        family.varying, family.template = varying, None
        try:
            traced = capture_symbolic(self._module, call, varying, self._precision, channels_last=self._channels_last)
            family.template = Template(*traced, self._precision, self._channels_last)
        except SymbolicError as error:
            _log.debug("not traced with symbols for sizes: %s", error)
            return False
        return True


def _sizes(call: Call) -> Sizes:
    return tuple(tuple(tensor.shape) for tensor in call.tensors)


def _varying_dimensions(calls: Sequence[Sizes]) -> list[frozenset[int]]:
    """Return for each tensor of the calls the dimensions whose sizes are not the same in all calls."""
    varying: list[frozenset[int]] = []
    for shapes in zip(*calls, strict=True):  # of the same tensor in all calls
        sizes_by_dim = zip(*shapes, strict=True)
        varying.append(frozenset(dim for dim, sizes in enumerate(sizes_by_dim) if len(set(sizes)) > 1))
    return varying


def _can_use_symbols(call: Call, seen: Sequence[Sizes], varying: Sequence[frozenset[int]]) -> bool:
    """Return whether a call can be traced with symbols.

    Sizes that are equal in it must be equal in all calls, as they get the same symbol. None may be 0 or 1, which torch
    specializes. Its tensors must not share memory. ``seen``: sizes in the earlier calls; ``varying``: for each tensor,
    the dimensions that become symbols, at least one in all.
    """
    if call.aliases != tuple(range(len(call.tensors))):
        return False
    earlier_sizes: dict[int, set[tuple[int, ...]]] = {}  # of the dimensions that have a size in this call
    for tensor, dims in enumerate(varying):
        for dim in dims:
            size = call.tensors[tensor].shape[dim]
            earlier_sizes.setdefault(size, set()).add(tuple(sizes[tensor][dim] for sizes in seen))
    return min(earlier_sizes) > 1 and all(len(sizes) == 1 for sizes in earlier_sizes.values())
