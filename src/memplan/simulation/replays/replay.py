"""Replay a snapshot of torch's CUDA memory with the simulator that makes all predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from memplan._bytes import parse_bytes
from memplan.simulation.allocator.settings import AllocatorSettings, parse_settings
from memplan.simulation.replays.exact import ExactReplay
from memplan.simulation.replays.initial_state import Start, rewind
from memplan.simulation.replays.replayed import Replay, timeline_over
from memplan.simulation.replays.requests import Request, requests_of
from memplan.simulation.snapshots.read import Snapshot, read_snapshot

_MAX_CORRECTIONS = 20


def replay(
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    *,
    settings: str | AllocatorSettings | None = None,
    capacity: str | int | None = None,
    gpu: int | None = None,
) -> Replay:
    """Replay the history of a snapshot of torch's CUDA memory.

    By default every address and every segment is compared with the recorded ones. With ``settings`` or ``capacity``
    the replay is a what-if: the same requests in the same order, with other allocator settings or another card size.

    Args:
        path_or_dict: a file that `torch.cuda.memory._dump_snapshot` wrote (or JSON of the same, each also as .gz), or
            the dict of `torch.cuda.memory._snapshot()`. A pickle is read without running anything in it.
        settings: as in PYTORCH_ALLOC_CONF; by default as recorded.
        capacity: bytes of the card available to torch ("24 GiB" or a number). By default unlimited, unless the
            recording ran out of memory: then the recorded capacity.
        gpu: the GPU to replay; needed if the snapshot has more than one.

    Raises:
        TargetError: the file cannot be read.
        SnapshotFormatError: the file is no snapshot.
        DeviceError: the snapshot has several GPUs and ``gpu`` is None, or nothing of ``gpu``.
        UsageError: unknown settings.
        UnitError: ``capacity`` is no number of bytes.

    Example:
        >>> replay = memplan.replay("snapshot.pickle")
        >>> replay.mismatches
        []
        >>> memplan.replay("snapshot.pickle", settings="expandable_segments:True").peak_reserved
        88080384
    """
    settings = parse_settings(settings) if isinstance(settings, str) else settings
    limit = None if capacity is None else parse_bytes(capacity)
    snapshot = read_snapshot(path_or_dict, gpu)
    start = rewind(snapshot)
    requests = requests_of(snapshot, start)
    exact = replay_exactly(snapshot, start, requests)
    if settings is None and limit is None:
        return exact
    from memplan.simulation.replays.what_if import what_if

    return what_if(exact, settings, limit)


def replay_exactly(snapshot: Snapshot, start: Start, requests: Sequence[Request | None]) -> Replay:
    """Replay a snapshot under its recorded settings, and compare each address and segment with the recording.

    The sizes of a few blocks that were live at the start are unknown: where a replayed address differs, the block that
    explains the difference is enlarged and the replay repeated. The replay with the fewest mismatches is returned.
    """
    best = exact = ExactReplay(snapshot, start, requests)
    exact.run()
    for _ in range(_MAX_CORRECTIONS):
        if exact.suspect is None:
            break
        start = start.with_larger_block(*exact.suspect)
        exact = ExactReplay(snapshot, start, requests)
        exact.run()
        if len(exact.mismatches) < len(best.mismatches):
            best = exact
    timeline = timeline_over(snapshot, best.levels, best.allocator)
    return Replay(
        snapshot, best.start, tuple(requests), snapshot.settings, capacity=None, compared=True,
        mismatches=best.mismatches, timeline=timeline, ooms=tuple(best.ooms),
    )  # fmt: skip
