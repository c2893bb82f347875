"""The result of `fit`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from memplan._display import Displayed
from memplan._interrupts import deferred
from memplan.planning.plan.plan import Plan
from memplan.rewriting.calls import Calls, CallStats, sum_stats
from memplan.verification.proof.proof import Proof


def optimizer_note(optimizer: Any) -> str:
    """Return the note of a plan that counts the memory of another optimizer than the user's."""
    return (
        f"the plan counts the state of {type(optimizer).__name__}, with moments in 8 bits: train with fitted.optimizer "
        "in place of your own"
    )


@dataclass(repr=False)
class Fitted(Displayed):
    """A model whose step runs within a budget."""

    model: nn.Module
    """The user's model; its calls run as planned."""
    loss: nn.Module | None
    """``(*inputs, *targets) -> loss``: model and loss as one planned graph, where a loss was given. Plan and proof are
    then about this call, not about the model's own."""
    plan: Plan
    """Plan of the call; of a sharded model, that of one of its blocks: a `CheckpointPlan` if no block has a graph."""
    proof: Proof
    changed: bool
    """False where the step fits unplanned: then nothing was changed."""
    optimizer: Any = None
    """The live optimizer where updates are early, to read and set its learning rate and state; its ``step()`` has
    nothing left to do. Where the plan has moments in 8 bits (`Precision.moments`), an optimizer of torchao or
    bitsandbytes for the model's parameters: train with it in place of your own."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user; later calls that are planned anew add theirs."""
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)
    _calls: list[Calls] = field(default_factory=list, repr=False)

    @property
    def stats(self) -> CallStats:
        """Counts of the calls since `fit`, of the model and of ``loss``: as planned, unplanned and why, without grad.
        Where the step fits unplanned nothing is counted."""
        return sum_stats(calls.stats() for calls in self._calls)

    def undo(self) -> None:
        """Make the model run as before. An ordinary update finds its gradients again."""
        with deferred():
            self._undo.close()
        self.changed = False

    def __copy__(self) -> Fitted:
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        """State of a pickle or a deep copy, whose model runs unplanned, as copies of planned models do."""
        state = dict(vars(self), _undo=ExitStack(), _calls=[])
        if self.changed:
            how_to_plan = "memplan.fit(..., plan=fitted.plan) fits it without a search"
            note = f"a copy of a fitted model runs unplanned: {how_to_plan}"
            state |= {"changed": False, "notes": [*self.notes, note]}
        return state
