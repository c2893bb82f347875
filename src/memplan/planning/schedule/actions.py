"""Choices about a step, and the actions of the schedule that results from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.levers.lever import STAYS, GradientUse

ActionKind = Literal["run", "store", "stored", "fetch", "fetched", "write", "receive", "give"]


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions about a step: the input of `schedule`.

    A forward value that the backward pass reads (or needs to recompute such a value) is saved as it is, unless it is
    listed here.
    """

    recompute: frozenset[int] = frozenset()
    """Ids of forward values (bases) that are freed after their last use in the forward pass, and recomputed."""
    kept_as: frozenset[tuple[str, int]] = frozenset()
    """(Name of a lever, id of a forward value): values that are saved in a form of that lever. If the form serves
    direct readers only, ``recompute`` and other forms decide about the value for the other readers."""
    gradients: GradientUse = STAYS
    """Use of each parameter's gradient once it is complete and nothing reads the parameter any more. (A parameter with
    hooks that may change it gets its gradient then in any case.)"""
    in_place: bool = True
    """Results overwrite operands that are freed, where an op allows it."""
    pieces: frozenset[int] | None = None
    """Ops that work in place piece by piece (they have a ``scratch_into``), which can be slower. None: all that can."""
    fused: bool = False
    """Run by the engine ``inductor``: each pass as fused kernels, not op by op."""
    joined: bool = False
    """With ``fused``: the two ops of a convolution's derivative are a single kernel, where that does not raise the peak
    (`memplan.planning.inductor.merge_convolution_backward`)."""

    def kept_by(self, lever: str) -> frozenset[int]:
        """Return the values that are saved in a form of ``lever``."""
        return frozenset(value for name, value in self.kept_as if name == lever)


@dataclass(frozen=True, slots=True)
class Action:
    """A single action of the engine. The values in ``frees`` are freed right after it."""

    kind: ActionKind
    """run: run an op. store, fetch: store a value in a kept form, or fetch it back; for an asynchronous copy to or from
    host memory they begin the copy, and stored, fetched wait for its end. write: write a new value into an input or
    buffer. receive: receive the tangents (the backward pass begins). give: hand a complete gradient over."""
    op: int | None = None
    """run: index of the op."""
    value: int | None = None
    """store to fetched: the value (not its kept form). write: the input or buffer that is changed. give: the parameter
    or input whose gradient is given."""
    source: int | None = None
    """write: the value that is copied into ``value``. give: the gradient."""
    reads: tuple[int, ...] = ()
    """Bases and kept forms that must be live."""
    makes: tuple[int, ...] = ()
    """Bases and kept forms that it allocates; for a copy, the memory of its target. Other results are freed at once."""
    recomputed: bool = False
    """run: recomputed in the backward pass."""
    into: int | None = None
    """run: base that the first of ``makes`` overwrites. It is gone afterwards, without being named in ``frees``."""
    form: int | None = None
    """store to fetched: id of the kept form. run: id of the kept form that the op reads instead of the value itself."""
    copies: bool = False
    """give: the receiver gets a copy, because the gradient shares its memory or has other strides."""
    frees: tuple[int, ...] = ()

    def called(self, graph: JointGraph) -> GraphOp:
        """The op that a run action calls: for a recomputed op, its ``rerun``."""
        assert self.op is not None, "only ops are called"
        return graph.ops[self.op].rerun if self.recomputed else graph.ops[self.op]
