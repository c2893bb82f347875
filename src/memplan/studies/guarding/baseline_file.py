"""Read and write baseline files. Reading validates everything: the file can come from anyone's branch."""

from __future__ import annotations

import os

from memplan import _json
from memplan._json import Unreadable
from memplan.errors import BaselineError
from memplan.studies.guarding.baseline import SCHEMA, Baseline, Figures

FORMAT = "memplan.baseline"
_UPDATE = "Run memplan guard with --update, look at what changes, and commit the file"


def dumps(baseline: Baseline) -> str:
    """Return a baseline as JSON with a line for each layer and cause, so that diffs can be reviewed."""
    steps = [_json.text_of(_json.to_plain(step)).rstrip("\n") for step in baseline.steps]
    return f'{{"format":"{FORMAT}","schema":{SCHEMA},\n"steps":[\n' + ",\n".join(steps) + "\n]}\n"


def read(path: str | os.PathLike[str]) -> Baseline:
    """Read a baseline from a file.

    Raises:
        BaselineError: the file is missing, unreadable, damaged, of another format or of another schema version.
    """
    try:
        text = _json.read_text(path)
    except FileNotFoundError:
        raise BaselineError(f"there is no baseline {path}", expected="one in version control", do=_UPDATE) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BaselineError(
            f"the baseline {path} cannot be read ({reason})", expected="a file", do="Check the path"
        ) from error
    return loads(text, str(path))


def loads(text: str, source: str) -> Baseline:
    """Read a baseline from the text of `dumps`; errors name it ``source``. Raises BaselineError, as `read` does."""
    try:
        data = _json.parse(text)
    except Unreadable as error:
        raise _no_baseline(source, str(error)) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _no_baseline(source, f'it has no "format": "{FORMAT}"')
    if data.get("schema") != SCHEMA:
        raise BaselineError(
            f"the baseline {source} has schema version {_json.shown(data.get('schema'))}",
            expected=f"version {SCHEMA}, which this memplan writes",
            do="Delete the file and write each of its steps anew with --update, or use the memplan that wrote it",
        )
    try:
        steps = _json.from_plain(tuple[Figures, ...], data.get("steps"), "steps")
        for step in steps:
            _check(step)
        if len({(step.target, step.options, step.device) for step in steps}) < len(steps):
            raise Unreadable("a step is there twice for one device")
    except Unreadable as error:
        raise _no_baseline(source, str(error)) from None
    return Baseline(steps)


def _check(figures: Figures) -> None:
    total = sum(part.bytes for part in figures.held)
    if total != figures.peak:
        raise Unreadable(f"what {figures.title!r:.60} holds adds up to {total} bytes, and its peak is {figures.peak}")


def _no_baseline(source: str, why: str) -> BaselineError:
    return BaselineError(
        f"{source} is no baseline, or a damaged one ({why})",
        expected="the file that memplan guard --update wrote",
        do="Take it from version control again, or delete it and run --update",
    )
