"""Peak against time, from all kept to the floor, and peers beside: as tables, and as a picture by matplotlib."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rich.table import Table

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.errors import InputError, UsageError
from memplan.reports.columns import Column
from memplan.reports.output import Page
from memplan.verification.peers.trials import PeerResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
_LOOKS = {
    "eager": {"marker": "s", "color": "tab:red"},
    "compiled": {"marker": "^", "color": "tab:purple"},
    "lossy": {"marker": "v", "color": "tab:green"},
    "wrong gradients": {"marker": "x", "color": "red"},
}
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


@dataclass(frozen=True, slots=True)
class Point:
    """A plan that was found."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """What it adds to the step, predicted; below 0 where computing in fewer bits is faster."""
    lost: str = ""
    """What it computes and saves in fewer bits, where it does."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans of one step; none has both a larger peak and more added seconds than another."""

    title: str
    points: tuple[Point, ...]
    """From all kept to the floor: the largest peak first."""
    eager_peak: int
    """Predicted bytes of the step without a plan."""
    step_seconds: float | None = None
    """Predicted, without a plan."""
    budget: int | None = None
    """Bytes that were asked for, marked."""
    peers: tuple[PeerResult, ...] = ()
    """What others take, measured; eager mode first."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: bytes and seconds."""
        data: dict[str, Any] = {
            "eager_peak": self.eager_peak,
            "step_seconds": self.step_seconds,
            "points": [
                {"peak": point.peak, "seconds": point.seconds, **({"lost": point.lost} if point.lost else {})}
                for point in self.points
            ],
        }
        return data | ({"peers": [peer.to_dict() for peer in self.peers]} if self.peers else {})


def table(frontier: Frontier, page: Page) -> Table:
    """A row for each plan, with what it frees and what that adds; the first within the budget is marked."""
    points, most = frontier.points, frontier.eager_peak
    fitting = next((p for p in points if frontier.budget is not None and p.peak <= frontier.budget), None)
    columns = [
        Column("Frontier", tuple(format_bytes(point.peak) for point in points), right=True),
        Column("of eager", tuple(f"{100 * p.peak / most:.0f} %" if most else "" for p in points), right=True, drop=2),
        Column("added time", tuple(format_seconds(point.seconds) for point in points), right=True),
    ]
    if frontier.step_seconds:
        shares = tuple(f"{100 * point.seconds / frontier.step_seconds:.1f} %" for point in points)
        columns.append(Column("of the step", shares, right=True, drop=1))
    if any(point.lost for point in points):
        columns.append(Column("lossy by", tuple(point.lost for point in points)))
    names = ["" for _ in points]
    if points:
        names[-1] = "the floor"
    if fitting is not None:
        at = points.index(fitting)
        names[at] = ", ".join(filter(None, ("the first in the budget", names[at])))
    columns.append(Column("", tuple(names), drop=3))
    return page.table(columns)


def peers_table(frontier: Frontier, page: Page) -> Table:
    """A row for each peer: measured peak, time beside eager mode, and whether its gradients are right."""
    peers = frontier.peers
    most = next((one.peak for one in peers if one.failed is None), 0)
    ran = [one.failed is None for one in peers]
    shares = (f"{100 * one.peak / most:.0f} %" if most and yes else "" for one, yes in zip(peers, ran, strict=True))
    return page.table(
        [
            Column("Peers, measured", tuple(one.peer.name for one in peers)),
            Column(
                "peak", tuple(format_bytes(p.peak) if r else "" for p, r in zip(peers, ran, strict=True)), right=True
            ),
            Column("of eager", tuple(shares), right=True, drop=2),
            Column("added time", tuple(_added(one) for one in peers), right=True),
            Column("gradients", tuple(_gradients(one) for one in peers)),
        ]
    )


def why_not(frontier: Frontier) -> list[str]:
    """Of each peer that did not run, the reason."""
    return [f"{one.peer.name} did not run: {printable(one.failed)}" for one in frontier.peers if one.failed is not None]


def _added(one: PeerResult) -> str:
    return "" if one.times is None else f"{100 * (one.times.ratio - 1):+.0f} %"


def _gradients(one: PeerResult) -> str:
    if one.failed is not None:
        return "did not run"
    if one.gradients == "lossy":
        return f"off by {one.error:.2%}"
    return one.gradients if one.worst is None else f"WRONG by {one.worst:.0%}"


def check_drawable(path: str) -> None:
    """See that a picture can be drawn into a file of this name before the work for it is done.

    Raises:
        InputError: it ends in none of `FORMATS`.
        UsageError: matplotlib is not installed.
    """
    if PurePath(path).suffix.lower() not in FORMATS:
        raise InputError(f"--frontier {path}", expected=f"a name that ends in {', '.join(FORMATS)}", do="Rename it")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--frontier draws with matplotlib, which is not installed",
            expected="memplan's extra charts",
            do="Install it: pip install 'memplan[charts]'",
        )


def draw(frontier: Frontier) -> Figure:
    """The picture: bytes at the peak to the right, seconds upwards."""
    from matplotlib.figure import Figure

    shown = [one for one in frontier.peers if one.times is not None]
    largest = max((frontier.eager_peak, *(point.peak for point in (*frontier.points, *shown))))
    unit, unit_name = next(((size, name) for size, name in _UNITS if largest >= size), _UNITS[-1])
    base, how = frontier.step_seconds or 0.0, "predicted: " if shown else ""
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for lossy, label in ((False, "planned"), (True, "planned, lossy")):
        points = [point for point in frontier.points if bool(point.lost) is lossy]
        if points:
            axes.plot([p.peak / unit for p in points], [base + p.seconds for p in points], "o-", label=how + label)
    axes.plot([frontier.eager_peak / unit], [base], "s", color="black", label=f"{how}without a plan")
    for name, look in _LOOKS.items():
        places = [(one.peak / unit, _height(one, base)) for one in shown if _kind(one) == name]
        if places:
            axes.scatter(*zip(*places, strict=True), label=f"measured: {name}", **look)
    if frontier.budget is not None and frontier.budget <= largest:
        axes.axvline(frontier.budget / unit, linestyle="--", color="gray", label="budget")
    axes.set_xlabel(f"{'' if shown else 'predicted '}peak ({unit_name})")
    axes.set_ylabel(f"{'' if shown else 'predicted '}seconds {'of a step' if base else 'added'}")
    axes.set_title(printable(frontier.title).replace("$", r"\$"))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _kind(one: PeerResult) -> str:
    return "wrong gradients" if one.wrong else one.peer.group


def _height(one: PeerResult, base: float) -> float:
    """Seconds on the plans' scale: what it adds to eager mode is measured, what eager mode takes is predicted."""
    assert one.times is not None, "only those that ran are shown"
    return base + (one.times.ratio - 1) * (base or one.times.before)


def picture(frontier: Frontier, path: str) -> bytes:
    """What a file of this name holds: the same bytes for the same frontier."""
    import matplotlib

    kind = PurePath(path).suffix.lower().removeprefix(".")
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "memplan"}):
        draw(frontier).savefig(buffer, format=kind, metadata=undated)
    return buffer.getvalue()
