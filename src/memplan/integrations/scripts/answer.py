"""Answer of a script's process as text: the process is not trusted, so it is read as data only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from memplan import errors
from memplan._json import LONGEST, Unreadable, from_plain, parse, to_plain
from memplan.errors import BudgetError, MemplanError, RecordingError
from memplan.integrations.scripts.request import Request, RunResult, ScriptEnded
from memplan.studies.capacity.largest import Largest
from memplan.trace.program_facts import Facts
from memplan.trace.trace import Trace
from memplan.verification.fitting.outcome import Fitting

MOST = LONGEST
"""Limit of an answer in bytes."""
_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MemplanError)
}
_TEXTS = ("found", "expected", "do")
_PLACES = ("layer", "where")


def text_of_run(ran: RunResult, contributed: str | None) -> str:
    """Return a run as text: a line of JSON, and the trace's own JSON after it. ``contributed`` is the text of the file
    that `memplan.measure` wrote for a contribution."""
    largest = ran.largest and _plain_fields(ran.largest, omitted=("room", "planned"))
    fitting = ran.fitting and _plain_fields(ran.fitting, omitted=("shortfall",))
    if ran.fitting is not None and fitting is not None:
        fitting["shortfall"] = ran.fitting.shortfall and _plain_error(ran.fitting.shortfall)
    head = {"facts": to_plain(ran.facts), "largest": largest, "fitting": fitting, "contributed": contributed}
    return json.dumps(head) + "\n" + ran.trace.to_json()


def text_of_error(error: MemplanError) -> str:
    """Return an error as text."""
    return json.dumps({"error": _plain_error(error)})


def read_answer(data: bytes, request: Request) -> tuple[RunResult, str | None]:
    """Return the run that a script's process answered with, and its contribution. Raises MemplanError if the answer is
    an error, Unreadable if it is no answer."""
    head, _, trace = data.decode("utf-8", "replace").partition("\n")
    plain = parse(head)
    if not isinstance(plain, dict):
        raise Unreadable("it is no mapping")
    if "error" in plain:
        raise _read_error(plain["error"])
    try:
        recorded = Trace.from_json(trace)
    except MemplanError as error:
        raise Unreadable(str(error)) from None
    facts = from_plain(Facts, plain.get("facts"), "facts")
    contributed = from_plain(str, plain["contributed"], "contributed") if plain.get("contributed") is not None else None
    ran = RunResult(request.command, recorded, facts)
    if plain.get("largest") is not None and request.room is not None:
        ran = replace(ran, largest=Largest(room=request.room, **_read_fields(Largest, plain["largest"])))
    if plain.get("fitting") is not None:
        ran = replace(ran, fitting=_read_fitting(plain["fitting"]))
    return ran, contributed


def _read_fitting(plain: Any) -> Fitting:
    """Read the outcome of planning. Its shortfall is an error, which `_plain_error` wrote. Raises Unreadable if
    ``plain`` is no such outcome."""
    values = dict(plain) if isinstance(plain, dict) else {}
    shortfall = values.pop("shortfall", None)
    error = None if shortfall is None else _read_error(shortfall)
    if error is not None and not isinstance(error, BudgetError):
        raise Unreadable("fitting.shortfall is no BudgetError")
    return Fitting(**_read_fields(Fitting, values), shortfall=error)


def _plain_fields(value: Any, omitted: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a dataclass as data for JSON, but for those that are ``omitted``."""
    return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.name not in omitted}


def _read_fields(kind: type, plain: Any) -> dict[str, Any]:
    """Read the fields of a dataclass that are in ``plain``, by their type hints; the caller adds the others. Raises
    Unreadable if ``plain`` is no mapping, or has a field that the dataclass lacks or of another type."""
    if not isinstance(plain, dict):
        raise Unreadable(f"{kind.__name__} is no mapping")
    hints = get_type_hints(kind, include_extras=True)
    unknown = set(plain) - {field.name for field in fields(kind)}
    if unknown:
        raise Unreadable(f"{kind.__name__} has an unknown {min(unknown)!r:.40}")
    return {name: from_plain(hints[name], value, name) for name, value in plain.items()}


def _plain_error(error: MemplanError) -> dict[str, Any]:
    """Return an error as data for JSON: its class, its texts, and the attributes of its class that messages need."""
    plain: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    plain |= {name: getattr(error, name) for name in _TEXTS}
    if isinstance(error, RecordingError):
        plain |= {name: getattr(error, name) for name in _PLACES}
    if isinstance(error, BudgetError):
        plain["smallest_budget"] = error.smallest_budget
    if isinstance(error, ScriptEnded):
        code = error.code if isinstance(error.code, (int, str)) or error.code is None else str(error.code)
        plain |= {"name": error.name, "code": code, "said": error.said}
    return plain


def _read_error(plain: Any) -> MemplanError:
    """Return the error from the data of `_plain_error`. Raises Unreadable if these are not the data of an error."""
    values: Mapping[str, Any] = from_plain(dict[str, str | int | None], plain, "error")
    texts = {name: None if values.get(name) is None else str(values[name]) for name in (*_TEXTS, *_PLACES, "text")}
    if values.get("kind") == ScriptEnded.__name__:
        return ScriptEnded(str(values.get("name")), values.get("code"), str(values.get("said", "")))
    kind = _KINDS.get(str(values.get("kind")))
    if kind is None or texts["found"] is None:
        raise Unreadable("error has no known kind")
    more: dict[str, Any] = {}
    if issubclass(kind, BudgetError):
        more["smallest_budget"] = from_plain(int, values.get("smallest_budget"), "error.smallest_budget")
    error = kind(texts["found"], expected=texts["expected"], do=texts["do"], **more)
    if isinstance(error, RecordingError):
        error.layer, error.where = texts["layer"], texts["where"]
    return error
