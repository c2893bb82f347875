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
        self.template: Template | None = None
        self.varying: list[frozenset[int]] = []
        """Dimensions that are symbols in the template, by tensor."""


class Shapes:
    """Captures calls of a module, with symbols for sizes if possible.

    Args:
        module: the module that is called.
        kind: returns a key of the call and the state of the module that does not depend on sizes.
        precision, channels_last: as for `capture`.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: Callable[[Call], Hashable],
        precision: Precision = EXACT,
        *,
        channels_last: bool = False,
    ) -> None:
        self._module, self._key, self._precision, self._channels_last = module, kind, precision, channels_last
        self._families: dict[Hashable, _SizeFamily] = {}

    def known(self, call: Call) -> None:
        """Record the sizes of a call that is captured elsewhere."""
        self._family_of(call).seen.append(_sizes(call))

    def captured(self, call: Call) -> Captured:
        """Capture a call, as `capture` does, or derive it from an earlier one."""
        family = self._family_of(call)
        captured = None if family.template is None else family.template.at(call)
        if captured is None and self._update_template(family, call) and family.template is not None:
            captured = family.template.at(call)
        family.seen.append(_sizes(call))
        return (
            capture(self._module, call, self._precision, channels_last=self._channels_last)
            if captured is None
            else captured
        )

    def _family_of(self, call: Call) -> _SizeFamily:
        """Return the earlier calls, and their template, from which this call differs at most in sizes."""
        metadata = tuple((t.dim(), t.dtype, t.device, t.requires_grad) for t in call.tensors)
        return self._families.setdefault((self._key(call), metadata, call.aliases), _SizeFamily())

    def _update_template(self, family: _SizeFamily, call: Call) -> bool:
        """Trace a new template if the call shows that more sizes vary, or if Python values that the template depends on
        have changed. Return whether there is a new template; a call that cannot be traced so is captured by itself."""
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


def _varying_dimensions(seen: Sequence[Sizes]) -> list[frozenset[int]]:
    """Return the dimensions whose sizes vary, by tensor."""
    return [
        frozenset(dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)
        for shapes in zip(*seen, strict=True)
    ]


def _can_use_symbols(call: Call, seen: Sequence[Sizes], varying: Sequence[frozenset[int]]) -> bool:
    """Return whether a call can be traced with symbols: sizes that are equal in it are equal in all calls, none is 0
    or 1 (torch specializes these), and its tensors share no memory."""
    sizes_in_calls: dict[int, set[tuple[int, ...]]] = {}
    for tensor, dims in enumerate(varying):
        for dim in dims:
            size = call.tensors[tensor].shape[dim]
            sizes_in_calls.setdefault(size, set()).add(tuple(sizes[tensor][dim] for sizes in seen))
    separate = call.aliases == tuple(range(len(call.tensors)))
    return separate and all(len(sizes) == 1 for sizes in sizes_in_calls.values()) and min(sizes_in_calls) > 1


# -- decisions
