"""Memory of every rank of a step, with an explanation for each group of equal ranks (`memplan.roles`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from memplan import _torch
from memplan._display import Displayed
from memplan._json import Saved, Unreadable
from memplan._text import ranks_text
from memplan.errors import RecordingError
from memplan.explanation.explain import device_of, explain_trace
from memplan.explanation.host import read_host
from memplan.explanation.model import Explanation
from memplan.studies.axes.subject import Subject
from memplan.studies.roles.grouping import group_ranks
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import record_for
from memplan.trace.recording.session import Environment, choose_target, public
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that allocate and free the same, with their explanation."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    """Indices of the pipeline stages of the first of these ranks; () without a pipeline."""
    explanation: Explanation
    """Explanation of the first of these ranks that was recorded."""

    @property
    def largest(self) -> str:
        """Cause with the most bytes at the allocated peak."""
        return max(self.explanation.by_cause.items(), key=lambda row: row[1])[0]

    @property
    def reserved_share(self) -> float | None:
        """Reserved peak as a share of the card's capacity; None on the CPU."""
        card = self.explanation.card
        return None if card is None else self.explanation.timeline.peak_reserved / card.verdict.capacity


@dataclass(frozen=True, slots=True, repr=False)
class Roles(Saved, Displayed):
    """All ranks of a step, the highest reserved peak first. Sizes are bytes."""

    FORMAT: ClassVar[str] = "memplan.roles"
    AGAIN: ClassVar[str] = "Explain the ranks again"

    title: str
    device: str
    world: int
    roles: tuple[Role, ...]
    recorded: tuple[int, ...]
    """Ranks that were recorded; each other rank is assumed to equal the recorded ranks of its role."""
    unsettled: tuple[int, ...] = ()
    """Ranks between two different ranks that were not recorded, as there are too many: they need at most the memory of
    their role."""

    def _check(self) -> None:
        """Raise Unreadable if the roles of a loaded file do not contain each rank once."""
        ranks = sorted(rank for role in self.roles for rank in role.ranks)
        if not ranks or len(ranks) != self.world or ranks != list(range(len(ranks))):
            raise Unreadable(f"has roles that are not those of {self.world} ranks")
        if not all(role.ranks for role in self.roles):
            raise Unreadable("has a role without ranks")

    @property
    def fullest(self) -> Role:
        """Role with the highest reserved peak; on the CPU, with the highest allocated peak."""
        return self.roles[0]


@public
def roles(
    what: Any,
    *inputs: Any,
    world: int,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: tuple[Any, ...] = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | str | None = None,
    dtype: torch.dtype | str | None = None,
    settings: str | None = None,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
    host: str | int | None = None,
) -> Roles:
    """Explain the memory of every rank of a step on several cards, once for each group of equal ranks.

    Up to eight ranks are all recorded. Of more ranks, the first and the last along each dimension of the meshes are
    recorded, each stage of a pipeline, and ranks between two different ranks. Ranks between two equal ranks are equal
    to them, since shards of `torch.chunk` never grow with the rank.

    Args:
        what: a ``build`` that shards or copies its model and returns a step, as for `record`; a module, or a callable
            that returns a module, is the same on each rank.
        world: number of ranks.
        inputs, kwargs, targets, loss, optimizer, device, autocast, dtype, settings, assume, cudnn, host: as for
            `explain`.

    Raises:
        StepError: a rank cannot be recorded.
        InputError: the ranks are more stages of a pipeline than can be recorded.

    Example:
        >>> ranks = memplan.roles(build, device="h100", world=8)
        >>> [role.ranks for role in ranks.roles]
        [(0, 1, 2, 3, 4, 5, 6, 7)]
    """
    options = StepOptions(
        inputs, kwargs, targets, loss, optimizer, autocast=autocast, train=True, dtype=dtype
    ).checked()
    target = choose_target(device_of(what) if device is None else device, assume, cudnn, world, rank=0)
    subject = Subject(what, options)
    build = subject.build(on_card=target.card is not None)
    room = read_host(host)

    def explain(trace: Trace, title: str) -> Explanation:
        return explain_trace(trace, title=title, card=target.card, settings=settings, host=room)

    return find_roles(lambda rank: record_for(build, replace(target, rank=rank)), explain, world, title=subject.title)


def find_roles(
    record: Callable[[int], Trace],
    explain: Callable[[Trace, str], Explanation],
    world: int,
    *,
    title: str,
    progress: Callable[[str], None] = lambda _: None,
) -> Roles:
    """Record the ranks that `roles` needs, and explain each group of equal ranks.

    ``record(rank)`` records a rank, ``explain(trace, title)`` explains its trace, ``progress(text)`` gets each rank
    before it is recorded.
    """
    by_key: dict[str, tuple[int, Trace]] = {}  # the first rank with each recording

    def recorded(rank: int) -> Trace:
        """Record a rank; errors name it."""
        progress(f"rank {rank} of {world}")
        try:
            return record(rank)
        except RecordingError as error:
            raise error.about(f"rank {rank}") from error.__cause__

    def key_of(rank: int) -> str:
        """Record a rank; return a key that is equal for ranks that allocate the same."""
        trace = first if rank == 0 else recorded(rank)
        key = _fingerprint(trace)
        by_key.setdefault(key, (rank, trace))
        return key

    first = recorded(0)
    grouping = group_ranks(world, _torch.Rank(0, world).local_world, first.groups, key_of)
    roles: list[Role] = []
    for rank, trace in by_key.values():
        ranks = next(ranks for ranks in grouping.roles if rank in ranks)
        stages = tuple(sorted(stage for group in trace.groups for stage in group.stages))
        roles.append(Role(ranks, stages, explain(trace, f"{title}, {ranks_text(ranks)}")))
    roles.sort(key=lambda role: (-role.explanation.timeline.peak_reserved, -role.explanation.timeline.peak_allocated))
    return Roles(title, first.device, world, tuple(roles), grouping.recorded, grouping.unsettled)


def _fingerprint(trace: Trace) -> str:
    """Return a hash that is equal for traces that allocate and free the same at the same ticks."""
    rows = [(s.bytes, s.low, s.cause, s.born, s.died, s.stream, s.used_on) for s in trace.counted]
    return hashlib.sha256(repr((trace.steps, trace.end, rows)).encode()).hexdigest()
