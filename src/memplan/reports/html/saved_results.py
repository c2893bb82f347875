"""Read saved results of every format for an HTML page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from memplan import _json
from memplan._json import Unreadable
from memplan.errors import InputError, MemplanError
from memplan.explanation.explain import explain_trace
from memplan.explanation.model import Explanation
from memplan.planning.plan.plan import Plan
from memplan.reports.html import other_sections, plan_sections, study_sections
from memplan.reports.html.fields import Fields
from memplan.reports.html.page_parts import Result, Section, size, table, text
from memplan.reports.html.step_sections import step_result
from memplan.studies.sweeps.sweep import Sweep
from memplan.trace.trace import Trace
from memplan.verification.proof.proof import Proof

Reader = Callable[[Any, str], Result]
"""Takes the parsed JSON and the name of the source."""


def _by_fields(show: Callable[[Fields], Result], schema: int = 1) -> Reader:
    def read(plain: Any, source: str) -> Result:
        try:
            _json.check_format({"schema": schema, **plain}, plain["format"], schema)
        except Unreadable as error:
            raise Unreadable(f"it {error}") from None
        return show(Fields(plain))

    return read


def _explanation(plain: Any, source: str) -> Result:
    return _with_measured(step_result(Explanation.from_dict(plain, source)), plain)


def _trace(plain: Any, source: str) -> Result:
    trace = Trace.from_dict(plain, source)
    return step_result(explain_trace(trace, title=os.path.basename(source)), "trace")


READERS: Mapping[str, Reader] = {
    "memplan.explanation": _explanation,
    "memplan.trace": _trace,
    "memplan.plan": lambda plain, source: plan_sections.plan_result(Plan.from_dict(plain, source)),
    "memplan.proof": lambda plain, source: plan_sections.proof_result(Proof.from_dict(plain, source)),
    "memplan.sweep": lambda plain, source: study_sections.sweep_result(Sweep.from_dict(plain, source)),
    "memplan.fit": _by_fields(plan_sections.fit_result),
    "memplan.fit_script": _by_fields(plan_sections.script_fit_result),
    "memplan.largest": _by_fields(study_sections.largest_result),
    "memplan.compare": _by_fields(study_sections.comparison_result),
    "memplan.guard": _by_fields(study_sections.guard_result),
    "memplan.quantized": _by_fields(study_sections.quantized_result),
    "memplan.watch": _by_fields(study_sections.watch_result),
    "memplan.findings": _by_fields(other_sections.findings_result),
    "memplan.replay": _by_fields(other_sections.replay_result),
    "memplan.post_mortem": _by_fields(other_sections.post_mortem_result),
    "memplan.devices": _by_fields(other_sections.devices_result),
    "memplan.cache": _by_fields(other_sections.cache_result),
}
"""By the value of the "format" field of a file."""


def result_of(content: str, source: str) -> Result:
    """Return the page content of a saved result.

    Args:
        content: JSON that a command wrote with ``--json``, ``--trace`` or ``--plan``, or a saved watch or proof.
        source: name of the file in error messages.

    Raises:
        MemplanError: the text is empty, cut off, not memplan's, or of another schema version.
    """
    known = ", ".join(sorted(name.removeprefix("memplan.") for name in READERS))
    try:
        if not content.strip():
            raise Unreadable("it is empty")
        plain = _json.parse(content)
        kind = plain.get("format") if isinstance(plain, dict) else None
        if not isinstance(kind, str) or kind not in READERS:
            raise Unreadable(f"its format is {kind!r:.60}" if kind is not None else "it names no format of memplan's")
        return READERS[kind](plain, source)
    except Unreadable as error:
        raise InputError(
            f"{source} cannot be shown: {error}",
            expected=f"a result that this memplan saved ({known})",
            do="Write it again with --json or --trace, or use the memplan that wrote it",
        ) from None


def read_result(path: str) -> Result:
    """Return the page content of a file. Raises MemplanError as `result_of`, and if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(_json.LONGEST + 1)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror})", expected="a file that memplan wrote", do="Check the path"
        ) from None
    try:
        result = result_of(content.decode("utf-8"), path)
    except UnicodeDecodeError:
        raise InputError(
            f"{path} is no text", expected="JSON that memplan wrote; a snapshot is shown by memplan replay --html",
            do="Choose another file",
        ) from None  # fmt: skip
    except MemplanError:
        raise
    return dataclasses.replace(result, source=path)


def _with_measured(result: Result, plain: Mapping[str, Any]) -> Result:
    """Add the table of measured and predicted peaks, and the script's command to the title, if the file has them."""
    data, measured = Fields(plain), list[Section]()
    comparison, script = data.inner("beside"), data.inner("script")
    if comparison is not None:
        rows = [
            (text(row.get("part", str)), size(row.maybe("predicted", int)), size(row.maybe("measured", int)))
            for row in comparison.rows("peaks")
        ]
        peaks = table("Peaks", ("peak of", "predicted", "measured"), rows)
        measured.append(Section("Measured beside predicted", (peaks,)))
    title = result.title if script is None else f"{script.get('command', str)}: {result.title.partition(': ')[2]}"
    return dataclasses.replace(result, title=title, sections=(*measured, *result.sections))
