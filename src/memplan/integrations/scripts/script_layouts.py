"""Layouts of a script, each started as its launcher would, and recorded alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memplan.devices.interconnects import between_machines, within_machine
from memplan.devices.model import Device
from memplan.errors import MemplanError
from memplan.integrations.scripts.launchers import Launch, Launcher
from memplan.integrations.scripts.process import run_script
from memplan.integrations.scripts.request import Request
from memplan.planning.graph.roofline import rates_of
from memplan.studies.layouts.layout import Layout, layouts_of
from memplan.studies.layouts.layouts import LayoutBytes, Layouts, ranked
from memplan.studies.step_time import exchanged_bytes, sent_bytes, step_time
from memplan.studies.sweeps.points import outcome_of


def script_layouts(
    request: Request,
    launcher: Launcher,
    card: Device,
    micro_batches: Sequence[int],
    *,
    tensor: Sequence[int] = (1,),
    losses: Sequence[bool] = (False,),
    per_node: int,
    link: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Layouts:
    """Run a script in each layout of ``request.world`` ranks, and compare what its rank takes.

    Args:
        request: how to run it.
        launcher: what sets its layout.
        card: the device of each rank.
        micro_batches: samples of a rank at a time; () for the script's own.
        tensor: ranks that share each layer.
        losses: see `layouts_of`.
        per_node: cards of a machine.
        link: bytes a second to another machine, instead of the catalogue's.
        progress: called with each layout that is recorded.

    Raises:
        MemplanError: no layout can be recorded; this is the first one's error.
    """
    assert request.world is not None, "layouts are of several ranks"
    links = within_machine(card)[0], round(link or between_machines(card)[0])
    run = _Runs(request, card, links, per_node)
    rows: list[LayoutBytes] = []
    launches: dict[Layout, Launch] = {}
    for layout in layouts_of(request.world, per_node, micro_batches or (0,), tensor, losses):
        micro_batch = layout.micro_batch or None  # 0: the script's own
        launch = launcher.launch(layout, micro_batch)
        if launch is None:
            continue
        # micro-batches of a layout come in ascending order
        smaller = [row for row in rows if replace(row.layout, micro_batch=0) == replace(layout, micro_batch=0)]
        if micro_batch is not None and any(not row.fits for row in smaller):
            rows.append(run.unrecorded(layout, smaller[-1].reason or "a smaller micro-batch does not fit"))
            continue
        progress(layout.title)
        row = run.row(layout, launch, micro_batch if launcher.batch_by_loader else None)
        launches[row.layout] = launch
        rows.append(row)
    if run.errors and all(row.reason for row in rows):
        raise run.errors[0]
    rows = ranked(rows)
    notes = (*launcher.notes, *run.notes)
    if rows and rows[0].fits:
        notes = (f"{rows[0].layout.title}: {launches[rows[0].layout].text}", *notes)
    return Layouts(
        str(request.command), card.name, request.world, per_node, card.capacity, blocks=0, links=links,
        rows=tuple(rows), notes=notes,
    )  # fmt: skip


class _Runs:
    """Runs of a script, each in a layout. ``links``: bytes a second within a machine, and to another."""

    def __init__(self, request: Request, card: Device, links: tuple[int, int], per_node: int) -> None:
        """``links``: bytes a second between two cards of a machine, and to another machine; ``per_node``: cards of a
        machine."""
        self._request, self._card, self._links, self._per_node = request, card, links, per_node
        self.errors: list[MemplanError] = []
        """Of the layouts that could not be recorded."""
        self.notes: tuple[str, ...] = ()
        """Notes of the last run."""

    def row(self, layout: Layout, launch: Launch, loader_batch: int | None) -> LayoutBytes:
        """Run the script in a layout, and return what its rank takes. ``loader_batch``: batch size to set in the
        script's loader; None: unchanged. An error is stored in ``errors``."""
        command = self._request.command
        request = replace(
            self._request,
            command=replace(command, arguments=(*command.arguments, *launch.arguments)),
            variables=tuple(launch.variables.items()),
            rules=replace(self._request.rules, batch=loader_batch),
        )
        try:
            ran = run_script(request)
            outcome = outcome_of(ran.trace, self._card, self._request.settings, keep=True)
        except MemplanError as error:
            self.errors.append(error)
            return self.unrecorded(layout, error.found)
        trace, figures = ran.trace, outcome.bytes
        assert figures is not None, "errors are raised"
        self.notes = outcome.notes
        time = step_time(trace, rates_of(self._card))
        sent = sent_bytes(trace)
        shard_ranks = layout.shards * layout.tensor
        seconds = self._ring(sent.sharded, layout.shards, shard_ranks)
        seconds += self._ring(sent.reduced, layout.replicas, shard_ranks * layout.replicas)
        size = ran.facts.batch_size
        batches_taken = [batch.taken for batch in ran.facts.batches if not batch.cut]
        passes = max(max(batches_taken, default=1) // max(ran.facts.updates, 1), 1)  # micro-batches of an update
        exchanging = self._ring(exchanged_bytes(trace), ranks=layout.tensor, spread=layout.tensor)
        return LayoutBytes(
            replace(layout, micro_batch=layout.micro_batch or size or 1), allocated=figures.peak,
            reserved=figures.reserved, needs=figures.needs, fits=figures.needs <= self._card.capacity, recorded=True,
            flops=time.flops if time is not None else 0, compute=time.seconds if time is not None else 0.0,
            sending=seconds, exchanging=exchanging, passes=passes,
        )  # fmt: skip

    def unrecorded(self, layout: Layout, reason: str) -> LayoutBytes:
        """Return the row of a layout that was not recorded."""
        return LayoutBytes(
            layout, allocated=0, reserved=0, needs=0, fits=False, recorded=False, flops=0, compute=0.0, sending=0.0,
            reason=reason,
        )  # fmt: skip

    def _ring(self, size: float, ranks: int, spread: int) -> float:
        """Return the seconds in which a ring of ranks sends ``size`` bytes that it gathers or reduces to shards.

        ``spread``: number of consecutive ranks among which those of the ring are. If they are more than those of a
        machine, the ring is as slow as the link to another machine.
        """
        within, between = self._links
        return size * (ranks - 1) / ranks / (within if spread <= self._per_node else between)
