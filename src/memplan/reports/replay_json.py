"""A replayed snapshot as JSON text. All sizes are bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from memplan.simulation.replays.exact import OutOfMemoryEvent
from memplan.simulation.replays.out_of_memory import OomExplanation
from memplan.simulation.replays.replayed import Replay
from memplan.simulation.replays.side_by_side import Cases, grouped


def dumps(cases: Cases) -> str:
    """The replay and its what-ifs as JSON, indented, the same text for the same snapshot.

    Example:
        >>> json.loads(dumps(cases))["recorded"]["peak_reserved"] == cases.replay.peak_reserved
        True
    """
    replay = cases.replay
    data = {
        "format": "memplan.replay",
        "source": replay.snapshot.source,
        "device": replay.timeline.device,
        "events": len(replay.snapshot.entries),
        "mismatches": [asdict(mismatch) for mismatch in replay.mismatches],
        "recorded": _case(replay),
        "cases": [_case(case) for case in (cases.base, *cases.others) if case is not replay],
        "fits": cases.all_fit,
        "segments": [asdict(group) | {"free": group.free} for group in grouped(replay.timeline.segments)],
        "out_of_memory": None if cases.explanation is None else _explanation(cases.explanation),
        "notes": list(replay.snapshot.notes),
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _case(case: Replay) -> dict[str, Any]:
    return {
        "settings": str(case.settings),
        "capacity": case.capacity,
        "peak_reserved": case.peak_reserved,
        "peak_allocated": case.peak_allocated,
        "fragmentation": case.fragmentation,
        "out_of_memory": [_oom(oom) for oom in case.ooms],
        "ended": case.ended,
    }


def _oom(oom: OutOfMemoryEvent) -> dict[str, Any]:
    names = ("index", "requested", "stream", "pool", "free", "reserved", "allocated")
    return {name: getattr(oom, name) for name in names}


def _explanation(why: OomExplanation) -> dict[str, Any]:
    return {
        **_oom(why.oom),
        "needed": why.needed,
        "capacity": None if why.capacity is None else asdict(why.capacity),
        "stack": [frame._asdict() for frame in why.stack],
        "free_blocks": [asdict(row) for row in why.free],
        "waiting": why.waiting,
        "largest_free": why.largest_free,
        "largest_why": why.largest_why,
        "holders": [
            {"frame": None if row.frame is None else row.frame._asdict(), "count": row.count, "bytes": row.bytes}
            for row in why.holders
        ],
        "remedies": [
            {"settings": str(row.settings), "peak_reserved": row.peak_reserved, "fragmentation": row.fragmentation}
            for row in why.remedies
        ],
        "tried": list(why.tried),
        "shortfall": why.shortfall,
        "beyond": why.beyond,
    }
