"""Calls that differ in sizes alone: captured once with symbols for the sizes, planned once.

The second call of a kind is traced with symbols for the sizes in which it differs from the first. From then on a graph
is a matter of numbers; where torch's guards say that other sizes lead to another graph, it is captured by itself. (In
torch 2.11 that is so for every size of a network with attention on the CPU: it asks for the sizes as numbers.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from memplan import _torch
from memplan.planning.calls import Call, Flat
from memplan.planning.capture import Captured, SymbolicError, capture, capture_symbolic, read
from memplan.planning.graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.precision import EXACT, Precision
from memplan.planning.schedule import Choices

_log = logging.getLogger("memplan")

Sizes = tuple[tuple[int, ...], ...]
"""The shapes of a call's tensors."""


@dataclass(frozen=True)
class Template:
    """A captured call with symbols for sizes."""

    symbolic: _torch.Symbolic
    flat: Flat
    precision: Precision = EXACT
    relaid: bool = False

    def at(self, call: Call) -> Captured | None:
        """What capturing the call would give; None where its sizes lead to another graph."""
        joint = self.symbolic.at(call.tensors)
        if joint is None:
            return None
        return replace(read(joint, self.flat, call, precision=self.precision), relaid=self.relaid)


class _Kind:
    """What is known of the calls that differ in sizes alone."""

    def __init__(self) -> None:
        self.seen: list[Sizes] = []
        self.template: Template | None = None
        self.varying: list[frozenset[int]] = []
        """The dimensions that are symbols in it, by tensor."""


class Shapes:
    """Captures the calls of one module.

    Args:
        module: whose calls they are.
        kind: tells kinds of calls, and states of the module, from others; whatever the sizes of the call's tensors.
        precision, relaid: as for `capture`.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: Callable[[Call], Hashable],
        precision: Precision = EXACT,
        *,
        relaid: bool = False,
    ) -> None:
        self._module, self._kind, self._precision, self._relaid = module, kind, precision, relaid
        self._kinds: dict[Hashable, _Kind] = {}

    def known(self, call: Call) -> None:
        """Somebody else captured this call, or will."""
        self._of(call).seen.append(_sizes(call))

    def captured(self, call: Call) -> Captured:
        """As `capture`."""
        kind = self._of(call)
        found = None if kind.template is None else kind.template.at(call)
        if found is None and self._renewed(kind, call) and kind.template is not None:
            found = kind.template.at(call)
        kind.seen.append(_sizes(call))
        return capture(self._module, call, self._precision, relaid=self._relaid) if found is None else found

    def _of(self, call: Call) -> _Kind:
        about = tuple((one.dim(), one.dtype, one.device, one.requires_grad) for one in call.tensors)
        return self._kinds.setdefault((self._kind(call), about, call.aliases), _Kind())

    def _renewed(self, kind: _Kind, call: Call) -> bool:
        """Whether there is a new template: one in which more sizes are symbols than in the last."""
        varying = _varying([*kind.seen, _sizes(call)])
        if varying == kind.varying or not any(varying) or not _distinct(call, kind.seen, varying):
            return False
        kind.varying = varying
        try:
            traced = capture_symbolic(self._module, call, varying, self._precision, relaid=self._relaid)
            kind.template = Template(*traced, self._precision, self._relaid)
        except SymbolicError as error:
            _log.debug("not traced with symbols for sizes: %s", error)
            return False
        return True


def _sizes(call: Call) -> Sizes:
    return tuple(tuple(tensor.shape) for tensor in call.tensors)


def _varying(seen: Sequence[Sizes]) -> list[frozenset[int]]:
    """The dimensions that are not the same in all of these, by tensor."""
    return [
        frozenset(dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)
        for shapes in zip(*seen, strict=True)
    ]


def _distinct(call: Call, seen: Sequence[Sizes], varying: Sequence[frozenset[int]]) -> bool:
    """Whether a call is one to learn from: sizes that are equal in it are equal in all calls, none is 0 or 1, which
    torch takes for numbers, and its tensors share no memory."""
    classes: dict[int, set[tuple[int, ...]]] = {}
    for at, dims in enumerate(varying):
        for dim in dims:
            size = call.tensors[at].shape[dim]
            classes.setdefault(size, set()).add(tuple(sizes[at][dim] for sizes in seen))
    apart = call.aliases == tuple(range(len(call.tensors)))
    return apart and all(len(found) == 1 for found in classes.values()) and min(classes) > 1


# -- decisions


def taken_over(choices: Choices, of: JointGraph, graph: JointGraph) -> Choices | None:
    """Choices made for one graph, as choices for another of the same step with sizes that are nowhere larger.

    Values are told by the ops that make them, in order; views do not count. None where the forward passes are not
    the same, or something is larger. What the backward pass does with what it is given may differ (small tensors are
    treated otherwise): whether the choices keep a budget is for the validator to say.
    """
    same = _same_values(of, graph)
    if same is None or any(graph.values[new].bytes > of.values[old].bytes for old, new in same.items()):
        return None
    return replace(
        choices,
        recompute=frozenset(same[value] for value in choices.recompute if value in same),
        encode=frozenset(same[value] for value in choices.encode if value in same),
        offload=frozenset(same[value] for value in choices.offload if value in same),
        pieces=_same_ops(choices.pieces, of, graph),
    )


def _same_values(one: JointGraph, other: JointGraph) -> Mapping[int, int] | None:
    """By the values that own memory in a forward pass: the same of another graph."""
    same: dict[int, int] = {}
    for a, b in zip(_handed(one), _handed(other), strict=False):
        same[a] = b
        if (one.values[a].kind, one.values[a].path) != (other.values[b].kind, other.values[b].path):
            return None
    if len(_handed(one)) != len(_handed(other)) or len(one.forward_ops) != len(other.forward_ops):
        return None
    for a, b in zip(one.forward_ops, other.forward_ops, strict=True):
        if (a.target, len(a.makes), a.random, a.once) != (b.target, len(b.makes), b.random, b.once):
            return None
        if tuple(same[value] for value in a.reads) != b.reads:
            return None
        same.update(zip(a.makes, b.makes, strict=True))
    returned = [[graph.base(value) for value in graph.outputs] for graph in (one, other)]
    return same if [same.get(value) for value in returned[0]] == returned[1] else None


def _handed(graph: JointGraph) -> list[int]:
    return [value.id for value in graph.values if value.kind in (*RESIDENT, "tangent")]


def _same_ops(ops: frozenset[int] | None, one: JointGraph, other: JointGraph) -> frozenset[int] | None:
    """The same ops of another graph; None, which stands for all, where its ops are others."""
    if not ops:
        return ops
    pairs = list(zip(_proper(one), _proper(other), strict=False))
    if len(_proper(one)) != len(_proper(other)) or any(a.target != b.target for a, b in pairs):
        return None
    return frozenset(b.index for a, b in pairs if a.index in ops)


def _proper(graph: JointGraph) -> list[GraphOp]:
    return [*graph.forward_ops, *graph.backward_ops]
