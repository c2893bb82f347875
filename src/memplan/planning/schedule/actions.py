"""What a schedule does, action by action, and the choices that it is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.planning.graph.joint_graph import GraphOp, JointGraph

ActionKind = Literal["run", "encode", "decode", "store", "stored", "fetch", "fetched", "write", "receive", "give"]


@dataclass(frozen=True, slots=True)
class Choices:
    """What is decided about a step: the input of `schedule`.

    A value made in the forward pass and read in the backward pass (or needed to make such a value again) is kept,
    unless it is named here.
    """

    recompute: frozenset[int] = frozenset()
    """Ids of forward values (bases) that are freed after their last use in the forward pass, and made again."""
    encode: frozenset[int] = frozenset()
    """Ids of forward values that are kept in their encoded form instead. Where that serves direct readers only,
    ``recompute`` and ``offload`` say what becomes of the value for the others."""
    early: bool = False
    """Each parameter is updated as soon as its gradient is complete and nothing reads it any more. (A parameter with
    hooks that may change it gets its gradient then in any case.)"""
    held: bool = False
    """Gradients are there before the step: each new one is added to the held one and freed."""
    in_place: bool = True
    """Results take over the memory of values that die, where an op allows it."""
    pieces: frozenset[int] | None = None
    """Ops that do so piece by piece (they have a ``scratch_into``), which can be slower; None: all that can."""
    fused: bool = False
    """The engine ``inductor`` runs it: each half as fused kernels, not op by op."""
    joined: bool = False
    """There, a convolution's derivative that is two ops is one kernel, where that takes no more than the peak
    (`memplan.planning.inductor.merge_convolution_backward`)."""
    offload: frozenset[int] = frozenset()
    """Ids of forward values that wait in host memory instead, unless they are encoded so that they can be got back."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the engine does. What ``frees`` names is freed right after it."""

    kind: ActionKind
    """run an op; encode or decode a value; begin to copy a value to host memory (store) or back (fetch), and wait
    until that is done (stored, fetched); write a new value into one that was handed in; receive the tangents (the
    backward pass begins); give a complete gradient away."""
    op: int | None = None
    """run: index of the op."""
    value: int | None = None
    """encode to fetched: the value (not its other form). write: the value handed in that is changed. give: the value
    (parameter or input) whose gradient is given."""
    source: int | None = None
    """write: the value that is copied into it. give: the gradient."""
    reads: tuple[int, ...] = ()
    """Bases, encoded forms and copies in host memory that must be there."""
    makes: tuple[int, ...] = ()
    """Of the same, what is there afterwards: of a copy, its memory. What else the op makes is discarded at once."""
    recomputed: bool = False
    """run: again, in the backward pass."""
    into: int | None = None
    """run: base whose memory the first of ``makes`` takes over; it is gone afterwards, and not named in ``frees``."""
    direct: int | None = None
    """run: the value whose encoded form the op reads instead of the value itself."""
    copies: bool = False
    """give: the receiver gets a copy, because the gradient's memory is not its alone or is laid out otherwise."""
    frees: tuple[int, ...] = ()

    def called(self, graph: JointGraph) -> GraphOp:
        """run: the op that is called."""
        assert self.op is not None, "only ops are called"
        return graph.ops[self.op].rerun if self.recomputed else graph.ops[self.op]
