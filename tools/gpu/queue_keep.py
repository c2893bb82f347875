"""Results of `card_queue.py`, merged into the repository: golden files, budgets, and benchmarks/results/gpu.json.

Nothing that is known is overwritten by what differs, unless that is asked for: the difference is told instead. What
ran on an emulated card is never kept. The same results give the same files.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fit  # of this folder, as the next
import golden

from memplan.trace.card_run import golden_format

FILE = "gpu.json"
FORMAT = "memplan-gpu-results"
MOST_DIFFERENCES = 6
ELSEWHERE = ("cases", "files", "left")
"""Figures that have a file of their own: budgets and golden files."""
TIMES = ("took", "ratio", "quartiles", "of_copy", "ours_over_it", "overhead", "seconds", "per_second")
"""Ends of the names of seconds and of what is computed from them: they differ in every run."""
Row = dict[str, Any]


@dataclass
class Report:
    """What was merged."""

    lines: list[str] = field(default_factory=list)
    differs: bool = False
    """Whether something known differs, and stays."""

    def stays(self, name: str, differences: Iterable[str]) -> None:
        """Tell how a result differs from the known one, which stays."""
        told = list(differences)
        more = [f"and {len(told) - MOST_DIFFERENCES} more"] if len(told) > MOST_DIFFERENCES else []
        self.lines.append(f"{name}: differs, and the known one stays: {'; '.join(told[:MOST_DIFFERENCES] + more)}")
        self.differs = True


def keep(folder: Path, *, goldens: Path, results: Path, replace: bool = False) -> Report:
    """Merge a folder of results.

    Args:
        folder: what ``card_queue.py run`` wrote.
        goldens, results: the folders to merge into.
        replace: also replace what is known and differs, but no figure by an error.
    """
    report = Report()
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("results/*.json"))]
    real = [row for row in rows if not row["emulated"]]
    if len(real) < len(rows):
        report.lines.append(f"{len(rows) - len(real)} results of an emulated card: not kept")
    for row in real:
        if row["state"] != "done":
            report.lines.append(f"{row['entry']}: {row['state']}, not kept as a whole: {_last_line(row['error'])}")
    _keep_cases(real, results / "fit_gpu", replace, report)
    _keep_figures([row for row in real if row["state"] == "done"], results, replace, report)
    if real:
        _keep_goldens(folder / "goldens", goldens, replace, report)
    return report


def known(card: Mapping[str, Any], results: Path) -> list[str]:
    """Entries that are done on this card with this torch, without any figure that failed."""
    here = (row for row in _stored(results / FILE) if _key(row)[:2] == (card["card"], card["torch"]))
    return [row["entry"] for row in here if not failed(row["figures"])]


# Figures


def _stored(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []


def _key(row: Row) -> tuple[str, str, str]:
    return row["card"], row["torch"], row["entry"]


def failed(figures: Row) -> bool:
    """Whether there is an error among the figures of an entry, or a part of it failed."""
    return bool(figures.get("failed")) or any(
        _has_error(part) for name, part in figures.items() if name not in ELSEWHERE
    )


def _has_error(part: Any) -> bool:
    if isinstance(part, dict):
        return _is_error(part) or any(map(_has_error, part.values()))
    return isinstance(part, list) and any(map(_has_error, part))


def _is_error(part: Any) -> bool:
    return isinstance(part, dict) and "error" in part


@dataclass
class _Merge:
    """Merges figures by name: an error gives way to any figure, a figure only to another one, if ``replace`` is set."""

    replace: bool
    differences: list[str] = field(default_factory=list)
    """What differs, and stays."""
    failures: list[str] = field(default_factory=list)
    """What failed now, and stays as it was."""

    def merged(self, old: Any, new: Any, where: str) -> Any:
        """Of figures that are called ``where``."""
        if _is_error(new) and not _is_error(old):
            self.failures.append(f"{where} failed, and the known figures stay: {_last_line(new['error'])}")
            return old
        if _is_error(old):
            return new
        if isinstance(old, dict) and isinstance(new, dict):
            both = {name: self.merged(old[name], new[name], f"{where}.{name}") for name in old if name in new}
            return old | new | both
        if self.replace:
            return new
        self.differences += _differences(old, new, where)
        return old


def _keep_figures(rows: Iterable[Row], folder: Path, replace: bool, report: Report) -> None:
    """Figures of whole entries, and the names of the parts that failed and are not known."""
    path = folder / FILE
    of = {_key(row): row for row in _stored(path)}
    for row in rows:
        new = {name: value for name, value in row.items() if name not in ("format", "version", "state", "emulated")}
        new["figures"] = {name: value for name, value in row["figures"].items() if name not in ELSEWHERE}
        if row["figures"].get("cases"):
            steps = {case["step"] for case in row["figures"]["cases"]}
            cases = fit.stored(fit.path_of(folder / "fit_gpu", row["card"], row["torch"]))
            known = {case["method"] for case in cases if case["step"] in steps and "error" not in case}
            parts = row["figures"].get("failed", {})
            new["figures"]["failed"] = {one: why for one, why in parts.items() if one not in known}
        old = of.get(_key(row))
        if old is None:
            of[_key(row)] = new
            report.lines.append(f"{row['entry']}: kept")
            continue
        merge = _Merge(replace)
        before = {name: value for name, value in old["figures"].items() if name != "failed"}  # as it is now
        figures = merge.merged(before, new["figures"], "figures")
        report.lines += [f"{row['entry']}: {one}" for one in merge.failures]
        if merge.differences:
            report.stays(row["entry"], merge.differences)
        if figures != old["figures"]:
            of[_key(row)] = new | {"figures": figures}
            report.lines.append(f"{row['entry']}: replaced")
    if of:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "version": 1, "results": [of[key] for key in sorted(of)]}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Each leaf of plain data that differs, by its path: no times."""
    if where.endswith(TIMES):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            path = f"{where}.{name}" if where else str(name)
            yield from _differences(old.get(name), new.get(name), path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (first, second) in enumerate(zip(old, new, strict=True)):
            yield from _differences(first, second, f"{where}[{number}]")
    elif old != new:
        yield f"{where} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:200]


# Budgets


def _keep_cases(rows: Iterable[Row], folder: Path, replace: bool, report: Report) -> None:
    """Cases of `fit.py`, into its own file of the card; a failure never takes the place of a figure."""
    for row in rows:
        path = fit.path_of(folder, row["card"], row["torch"])
        stored = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []
        before = {(case["step"], case["method"]): case for case in stored}
        new: list[Row] = []
        for case in sorted(row["figures"].get("cases", ()), key=lambda case: (case["step"], case["method"])):
            old = before.get((case["step"], case["method"]))
            name = f"{case['step']} {case['method']}"
            if old == case or fit.was_stopped(case):
                continue
            if old is not None and "error" in case and "error" not in old:
                report.lines.append(f"{name}: failed, and the known figures stay: {_last_line(case['error'])}")
            elif old is not None and "error" not in old and not replace:
                differences = list(_differences(old, case))
                if differences:
                    report.stays(name, differences)
            else:
                new.append(case)
                report.lines.append(f"{name}: {'kept' if old is None else 'replaced'}")
        if new:
            shared = {"gpu": row["card"], "memory": row["memory"], "torch": row["torch"], "cuda": row["cuda"]}
            fit.write(folder, [shared | case for case in new])


# Golden files


def _keep_goldens(source: Path, target: Path, replace: bool, report: Report) -> None:
    """Golden files with their indices; the folder stays below its limit of bytes, as when they are recorded."""
    for index in sorted(source.glob(f"*/*/{golden.INDEX}")):
        where = index.parent.relative_to(source)
        content = json.loads(index.read_text(encoding="utf-8"))
        if content["format"] != golden_format.FORMAT:
            report.lines.append(f"{where}: golden files of an emulated card, not kept")
            continue
        rows: dict[str, Row] = {}
        for path in sorted(index.parent.glob("*.json.gz")):
            name = path.name.partition(".")[0]
            if name not in content["steps"]:
                continue  # its process was ended before the index was written
            known_file = target / where / path.name
            if known_file.exists():
                differences = list(_golden_differences(known_file, path))
                if not differences:
                    continue
                if not replace:
                    report.stays(f"{where}/{name}", differences)
                    continue
            known_file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, known_file)
            rows[name] = content["steps"][name] | {
                "folder": str(where), "gpu": content["gpu"], "versions": content["versions"],
                "environment": content["environment"], "format": content["format"],
            }  # fmt: skip
            report.lines.append(f"{where}/{name}: kept")
        if rows:
            _finish(target, where, rows, report)


def _finish(target: Path, where: Path, rows: dict[str, Row], report: Report) -> None:
    """Write the index. That of a known folder keeps its own head: each file says with what it was recorded."""
    index = target / where / golden.INDEX
    if index.exists():
        before = json.loads(index.read_text(encoding="utf-8"))
        if _head(before) != _head(next(iter(rows.values()))):
            report.lines.append(f"{where}: recorded with other versions or variables than the index says")
        rows = {name: row | _head(before) for name, row in rows.items()}
    golden.finish(target, rows, None)


def _head(content: Row) -> Row:
    return {name: content[name] for name in ("gpu", "versions", "environment")}


def _golden_differences(old: Path, new: Path) -> Iterator[str]:
    """How two golden files of a step differ in what was measured: not in the driver's release or notes."""
    before, after = (json.loads(gzip.decompress(path.read_bytes())) for path in (old, new))
    for name in ("build", "peaks", "end", "environment", "flags"):
        yield from _differences(before[name], after[name], name)
    events = [len(one["events"]["actions"]) if one["events"] else 0 for one in (before, after)]
    if all(events) and before["events"] != after["events"]:
        yield f"events {events[0]} -> {events[1]}"
