"""What people do today against a step that does not fit: nothing, or torch.utils.checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .models import Subject

Loss = Callable[[], Tensor]
SEQUENTIAL = "sequential-"
SEGMENTS = (2, 3, 4, 6, 8, 10, 13, 16, 20)
"""Numbers of segments: each a third more than the one before or less, since peak and time change little in between."""


def peers(subject: Subject) -> list[str]:
    """Names of the peers that suit this model, eager first."""
    segments = [count for count in SEGMENTS if count <= len(subject.sequence)]
    return ["eager", *subject.blocks, *(f"{SEQUENTIAL}{count}" for count in segments)]


def peer(subject: Subject, name: str) -> Loss:
    """What computes the loss as this peer does; it may change the subject's model."""
    if name.startswith(SEQUENTIAL):
        return _sequential(subject, int(name.removeprefix(SEQUENTIAL)))
    if name != "eager":
        _checkpointed(subject.blocks[name])
    return lambda: subject.loss(subject.model(*subject.inputs), *subject.targets)


def _checkpointed(blocks: Iterable[nn.Module]) -> None:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _sequential(subject: Subject, segments: int) -> Loss:
    def loss() -> Tensor:
        output = checkpoint_sequential(subject.sequence, segments, subject.inputs[0], use_reentrant=False)
        return subject.loss(output, *subject.targets)

    return loss
