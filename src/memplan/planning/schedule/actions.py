"""What a schedule does, action by action, and the choices that it is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.levers.lever import STAYS, GradientUse

ActionKind = Literal["run", "store", "stored", "fetch", "fetched", "write", "receive", "give"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What is decided about a step: the input of `schedule`.

    A value made in the forward pass and read in the backward pass (or needed to make such a value again) is kept,
    unless it is named here.
    """

    recompute: frozenset[int] = frozenset()
    """Ids of forward values (bases) that are freed after their last use in the forward pass, and made again."""
    kept_as: frozenset[tuple[str, int]] = frozenset()
    """(Name of a lever, id of a forward value) of values that are kept in a form of that lever instead. Where the form
    serves direct readers only, ``recompute`` and other forms say what becomes of the value for the others."""
    gradients: GradientUse = STAYS
    """What becomes of each parameter's gradient once it is complete and nothing reads the parameter any more. (A
    parameter with hooks that may change it gets its gradient then in any case.)"""
    in_place: bool = True
    """Results take over the memory of values that die, where an op allows it."""
    pieces: frozenset[int] | None = None
    """Ops that do so piece by piece (they have a ``scratch_into``), which can be slower; None: all that can."""
    fused: bool = False
    """The engine ``inductor`` runs it: each half as fused kernels, not op by op."""
    joined: bool = False
    """There, a convolution's derivative that is two ops is one kernel, where that takes no more than the peak
    (`memplan.planning.inductor.merge_convolution_backward`)."""

    def kept_by(self, lever: str) -> frozenset[int]:
        """Return the values that are kept in a form of one lever."""
        return frozenset(value for name, value in self.kept_as if name == lever)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the engine does. What ``frees`` names is freed right after it."""

    kind: ActionKind
    """run an op; store a value in a kept form, or fetch it back (where these are copies that run beside the ops, store
    and fetch begin them, and stored and fetched wait until they are done); write a new value into one that was handed
    in; receive the tangents (the backward pass begins); give a complete gradient away."""
    op: int | None = None
    """run: index of the op."""
    value: int | None = None
    """store to fetched: the value (not its kept form). write: the value handed in that is changed. give: the value
    (parameter or input) whose gradient is given."""
    source: int | None = None
    """write: the value that is copied into it. give: the gradient."""
    reads: tuple[int, ...] = ()
    """Bases and kept forms that must be there."""
    makes: tuple[int, ...] = ()
    """Of the same, what is there afterwards: of a copy, its memory. What else the op makes is discarded at once."""
    recomputed: bool = False
    """run: again, in the backward pass."""
    into: int | None = None
    """run: base whose memory the first of ``makes`` takes over; it is gone afterwards, and not named in ``frees``."""
    form: int | None = None
    """store to fetched: id of the kept form. run: id of the kept form that the op reads instead of the value itself."""
    copies: bool = False
    """give: the receiver gets a copy, because the gradient's memory is not its alone or is laid out otherwise."""
    frees: tuple[int, ...] = ()

    def called(self, graph: JointGraph) -> GraphOp:
        """run: the op that is called."""
        assert self.op is not None, "only ops are called"
        return graph.ops[self.op].rerun if self.recomputed else graph.ops[self.op]
