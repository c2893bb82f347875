"""Frontiers of peak memory against time, with measured baselines: their report, and a chart by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.reports.chart import plain, unit_of
from memplan.reports.document import Field, Part, Table, number_field, table_of
from memplan.verification.fitting.frontier import Frontier, Point
from memplan.verification.peers.trials import PeerResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS = {
    "eager": {"marker": "s", "color": "tab:red"},
    "compiled": {"marker": "^", "color": "tab:purple"},
    "lossy": {"marker": "v", "color": "tab:green"},
    "wrong gradients": {"marker": "x", "color": "red"},
}


def parts(frontier: Frontier) -> list[list[Part]]:
    """Return the sections of the report: the plans, and the baselines with the reasons why some did not run."""
    peers = frontier.peers
    reasons = [f"{peer.peer.name} did not run: {peer.failed}" for peer in peers if peer.failed is not None]
    return [[_plans(frontier)], [_peers(peers), *reasons] if peers else []]


def _plans(frontier: Frontier) -> Table:
    """Return a row for each plan: peak and added time; the last column names the first within the budget, and the
    floor."""
    points, eager_peak = frontier.points, frontier.eager_peak
    within = [] if frontier.budget is None else [point for point in points if point.peak <= frontier.budget]

    def remarks(point: Point) -> str:
        first = ["the first in the budget"] if within and point is within[0] else []
        return ", ".join(first + (["the floor"] if point is points[-1] else []))

    fields = [
        number_field("Frontier", lambda p: p.peak),
        Field("of eager", lambda p: f"{100 * p.peak / eager_peak:.0f} %" if eager_peak else "", right=True, drop=2),
        number_field("added time", lambda p: p.seconds, format_seconds),
    ]
    if step := frontier.step_seconds:
        fields.append(Field("of the step", lambda p: f"{100 * p.seconds / step:.1f} %", right=True, drop=1))
    if any(point.lost for point in points):
        fields.append(Field("lossy by", lambda p: p.lost))
    return table_of(points, [*fields, Field("", remarks, drop=3)])


def _peers(peers: Sequence[PeerResult]) -> Table:
    """Return a row for each baseline: measured peak, time compared with eager mode, and whether its gradients are
    right. Eager mode comes first."""
    eager_peak = next((result.peak for result in peers if result.failed is None), 0)

    def of_eager(result: PeerResult) -> str:
        return f"{100 * result.peak / eager_peak:.0f} %" if eager_peak and result.failed is None else ""

    def added_time(result: PeerResult) -> str:
        return "" if result.times is None else f"{100 * (result.times.ratio - 1):+.0f} %"

    fields = [
        Field("Peers, measured", lambda result: result.peer.name),
        number_field(
            "peak",
            lambda result: result.peak,
            cell=lambda result: format_bytes(result.peak) if result.failed is None else "",
        ),
        Field("of eager", of_eager, right=True, drop=2),
        Field("added time", added_time, right=True),
        Field("gradients", _gradients),
    ]
    return table_of(peers, fields)


def _gradients(result: PeerResult) -> str:
    """Return whether a baseline's gradients are right, or how far they are off."""
    if result.failed is not None:
        return "did not run"
    if result.gradients == "lossy":
        return f"off by {result.error:.2%}"
    return result.gradients if result.worst is None else f"WRONG by {result.worst:.0%}"


def draw(frontier: Frontier) -> Figure:
    """Return the chart: peak bytes on the x axis, seconds on the y axis."""
    from matplotlib.figure import Figure

    measured = [peer for peer in frontier.peers if peer.times is not None]
    largest = max((frontier.eager_peak, *(point.peak for point in (*frontier.points, *measured))))
    unit, unit_name = unit_of(largest)
    base, prefix = frontier.step_seconds or 0.0, "predicted: " if measured else ""
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for lossy, label in ((False, "planned"), (True, "planned, lossy")):
        points = [point for point in frontier.points if bool(point.lost) is lossy]
        if points:
            axes.plot([p.peak / unit for p in points], [base + p.seconds for p in points], "o-", label=prefix + label)
    axes.plot([frontier.eager_peak / unit], [base], "s", color="black", label=f"{prefix}without a plan")
    for name, look in _LOOKS.items():
        positions = [(peer.peak / unit, _height(peer, base)) for peer in measured if _kind(peer) == name]
        if positions:
            axes.scatter(*zip(*positions, strict=True), label=f"measured: {name}", **look)
    if frontier.budget is not None and frontier.budget <= largest:
        axes.axvline(frontier.budget / unit, linestyle="--", color="gray", label="budget")
    axes.set_xlabel(f"{'' if measured else 'predicted '}peak ({unit_name})")
    axes.set_ylabel(f"{'' if measured else 'predicted '}seconds {'of a step' if base else 'added'}")
    axes.set_title(plain(frontier.title))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _kind(result: PeerResult) -> str:
    """Return the group of a baseline in the chart's legend, a key of ``_LOOKS``."""
    return "wrong gradients" if result.wrong else result.peer.group


def _height(result: PeerResult, base: float) -> float:
    """Return the y position of a measured baseline in seconds.

    That is the predicted eager time ``base`` times the measured ratio to eager mode; if ``base`` is 0, since no time
    was predicted, the measured seconds in addition to eager mode.
    """
    assert result.times is not None, "only those that ran are shown"
    return base + (result.times.ratio - 1) * (base or result.times.before)
