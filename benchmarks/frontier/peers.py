"""What people do today against a step that does not fit: nothing, torch.utils.checkpoint, torch.compile, autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential

from memplan.verification.peers.peers import BUDGETS, Group, Peer, as_peer

from .models import Subject

Loss = Callable[[], Tensor]
SEQUENTIAL = "sequential-"
SEGMENTS = (2, 3, 4, 6, 8, 10, 13, 16, 20)
"""Numbers of segments: each a third more than the one before or less, since peak and time change little in between."""
PLAIN, BUDGET = "compile", "compile-"
COMPILED = {
    PLAIN: Peer(PLAIN, compiled=True),
    **{f"{BUDGET}{share}": Peer(f"{BUDGET}{share}", compiled=True, memory_budget=share) for share in BUDGETS},
    "compile-per_block": Peer("compile-per_block", compiled=True, checkpointed=True),
}
"""Model and loss through torch.compile, as it is, under its memory budgets, and with checkpoints of the blocks."""
LOWEST_LOSSY = "autocast-per_block"
LOSSY = {
    "autocast": Peer("autocast", autocast=torch.bfloat16),
    LOWEST_LOSSY: Peer(LOWEST_LOSSY, autocast=torch.bfloat16, checkpointed=True),
}
"""In bfloat16: a group of its own, as its results are others."""


def peers(subject: Subject) -> list[str]:
    """Names of the peers that suit this model, eager first."""
    segments = [count for count in SEGMENTS if count <= len(subject.sequence)]
    return ["eager", *subject.blocks, *(f"{SEQUENTIAL}{count}" for count in segments), *COMPILED, *LOSSY]


def group_of(name: str) -> Group:
    """Among whom a peer stands."""
    return "compiled" if name in COMPILED else "lossy" if name in LOSSY else "eager"


def peer(subject: Subject, name: str) -> Loss:
    """What computes the loss as this peer does."""
    if name.startswith(SEQUENTIAL):
        return _sequential(subject, int(name.removeprefix(SEQUENTIAL)))
    one = COMPILED.get(name) or LOSSY.get(name) or Peer(name, checkpointed=name != "eager")
    blocks = subject.blocks.get(name, subject.blocks["per_block"]) if one.checkpointed else ()

    def step() -> Tensor:
        return subject.loss(subject.model(*subject.inputs), *subject.targets)

    return as_peer(step, one, blocks)


def _sequential(subject: Subject, segments: int) -> Loss:
    def loss() -> Tensor:
        output = checkpoint_sequential(subject.sequence, segments, subject.inputs[0], use_reentrant=False)
        return subject.loss(output, *subject.targets)

    return loss
