"""Choices about a step, and the actions of the schedule that results from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memplan.planning.graph.joint_graph import GraphOp, JointGraph
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE, GradientUse

ActionKind = Literal["run", "store", "stored", "fetch", "fetched", "write", "receive", "give"]


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions about a step: the input of `schedule`.

    A forward value that the backward pass reads (or needs to recompute such a value) is saved as it is, unless it is in
    ``recompute`` or ``saved_forms``.
    """

    recompute: frozenset[int] = frozenset()
    """Ids of forward values (bases) that are freed in the forward pass and recomputed in the backward pass."""
    saved_forms: frozenset[tuple[str, int]] = frozenset()
    """(Name of a lever, id of a forward value): values that are saved in an encoding of that lever. If the encoding
    cannot be decoded, and serves the ops alone that read it directly, ``recompute`` and other encodings decide about
    the value for the other readers."""
    gradients: GradientUse = KEPT_UNTIL_UPDATE
    """Use of each parameter's gradient once it is complete and the parameter was read for the last time. (A parameter
    with hooks that may change it always gets its gradient then.)"""
    in_place: bool = True
    """Whether results overwrite operands that are freed, if the op has an in-place form."""
    pieces: frozenset[int] | None = None
    """Indices of the ops that may work in place piece by piece, which can be slower, of those that can
    (``GraphOp.in_place_scratch``). None: all of them."""
    order: tuple[int, ...] = ()
    """Indices of the backward ops in the order in which they run; empty: as captured."""
    fused: bool = False
    """Whether the engine ``inductor`` runs each pass as fused kernels."""
    joined: bool = False
    """With ``fused``: whether the two ops of a convolution's derivative become a single kernel if that does not raise
    the peak (`memplan.planning.inductor.merge_convolution_backward`)."""

    def saved_by(self, lever: str) -> frozenset[int]:
        """Return the ids of the values that are saved in an encoding of ``lever``."""
        return frozenset(value for name, value in self.saved_forms if name == lever)


@dataclass(frozen=True, slots=True)
class Action:
    """An action of the engine. The values in ``frees`` are freed right after it."""

    kind: ActionKind
    """run: run an op. store, fetch: encode a value, or decode it; for an asynchronous copy to or from host memory they
    begin the copy, and stored, fetched wait for its end. write: write a new value into an input or buffer. receive:
    receive the tangents (the backward pass begins). give: return a complete gradient."""
    op: int | None = None
    """run: index of the op."""
    value: int | None = None
    """store to fetched: the value (not its encoding). write: the input or buffer that is changed. give: the parameter
    or input whose gradient is returned."""
    source: int | None = None
    """write: the value that is copied into ``value``. give: the gradient."""
    reads: tuple[int, ...] = ()
    """Bases and encodings that must be live."""
    makes: tuple[int, ...] = ()
    """Bases and encodings that it allocates; for a copy, the memory of its target. Other results are freed at once."""
    recomputed: bool = False
    """run: recomputed in the backward pass."""
    overwritten: int | None = None
    """run: base whose memory the first of ``makes`` takes over. It is not in ``frees``."""
    encoding: int | None = None
    """store to fetched: id of the encoding. run: id of the encoding that the op reads instead of the value."""
    returns_copy: bool = False
    """give: whether autograd gets a copy, because the gradient shares its memory or has other strides."""
    frees: tuple[int, ...] = ()

    def called_op(self, graph: JointGraph) -> GraphOp:
        """Return the op that a run action calls: for a recomputed value `GraphOp.recompute_op`."""
        assert self.op is not None, "only ops are called"
        return graph.ops[self.op].recompute_op if self.recomputed else graph.ops[self.op]
