"""How to train a module with several cards (`memplan.layouts`): the bytes of each layout, and its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from memplan import _torch
from memplan._display import Displayed
from memplan._json import Written, named
from memplan.devices.interconnects import between_machines, within_machine
from memplan.devices.model import Device
from memplan.errors import InputError, MemplanError, StepError, TargetError
from memplan.studies.axes.subject import Maker, Subject
from memplan.studies.layouts.layout import Layout, layouts_of
from memplan.studies.layouts.wrapped import (
    Blocks,
    Wrapped,
    blocks_of,
    checkpointed_blocks,
    counted_flops,
    rank_options,
    shortened,
)
from memplan.studies.sweeps.points import Bytes, record_point
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.recording.session import Environment, Target, choose_target, public
from memplan.trace.step import StepOptions, build_of

_FEW = 3, 5
"""Numbers of blocks that are recorded, where a module has more than the second and one more. From three on, sharded
blocks add as many bytes each: the next one's weights are gathered while one runs. Two more, as kinds may alternate."""


@dataclass(frozen=True)
class LayoutBytes:
    """What a layout takes of a rank's card, in bytes, and how long it takes at least."""

    layout: Layout
    allocated: int
    reserved: int
    needs: int
    """With the CUDA context."""
    fits: bool
    recorded: bool
    """Whether all of the module was recorded; else its bytes are extrapolated from fewer blocks."""
    compute: float
    """Seconds of a step by FLOPs alone, at the card's rate."""
    sending: float
    """Seconds of a step by the bytes that a rank sends alone, at the rate of its slowest link."""
    reason: str = ""
    """Why it was not recorded; empty where it was."""

    @property
    def seconds(self) -> float:
        """Seconds of a step at least: what is sent is sent while the card computes."""
        return max(self.compute, self.sending)

    @property
    def rate(self) -> float:
        """Samples of all ranks a second, at most."""
        samples = self.layout.micro_batch * self.layout.replicas * self.layout.shards
        return samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, repr=False)
class Layouts(Written, Displayed):
    """The layouts of a module, those that fit first, the fastest of them first."""

    FORMAT: ClassVar[str] = "memplan.layouts"

    title: str
    device: str
    world: int
    per_node: int
    capacity: int
    blocks: int
    """Number of the module's repeated blocks; 0 where it has none."""
    links: tuple[int, int]
    """Bytes a second of a rank within a machine, and to another one."""
    rows: tuple[LayoutBytes, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> LayoutBytes | None:
        """Return the fastest that fits, all of which was recorded; None where nothing fits."""
        return next((row for row in self.rows if row.fits), None)

    def _plain(self) -> dict[str, Any]:
        names = ("allocated", "reserved", "needs", "fits", "recorded", "compute", "sending", "rate", "reason")
        rows = [
            named(row.layout, "title", "replicas", "shards", "micro_batch", "reshard", "checkpoint")
            | named(row, *names)
            for row in self.rows
        ]
        return named(self, "title", "device", "world", "per_node", "capacity", "blocks", "links", "notes") | {
            "rows": rows
        }


@public
def layouts(
    what: Any,
    *inputs: Any,
    world: int,
    device: str,
    micro_batch: Sequence[int] = (1,),
    per_node: int = 8,
    link: float | None = None,
    kwargs: Mapping[str, Any] = {},  # read only
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | str | None = None,
    dtype: torch.dtype | str | None = None,
    settings: str | None = None,
    assume: Mapping[str, float] | None = None,
    cudnn: Environment = None,
) -> Layouts:
    """Compare ways to train a module with several cards: copies, shards, checkpoints, micro-batches.

    Each layout is one rank's training step under `DistributedDataParallel` or `fully_shard` in a fake process group.
    Of a module with many equal blocks two and four are recorded, and the rest is extrapolated; the first layout of the
    result is recorded whole.

    Args:
        what: a module, or a callable that makes one.
        inputs, kwargs, targets, loss, optimizer, dtype, settings, assume, cudnn: as for `explain`.
        world: number of ranks.
        device: a card of the catalogue.
        micro_batch: samples of a rank at a time, to compare.
        per_node: cards of a machine.
        link: bytes a second of a card to another machine, instead of the catalogue's.
        autocast: of copies; shards are gathered in this dtype instead (`MixedPrecisionPolicy`), and reduced in float32.

    Returns:
        The layouts, those that fit first, the fastest of them first.

    Raises:
        InputError: the world is no multiple of a machine's cards, or the device is no card.
        TargetError: ``what`` makes no module.
        StepError: no layout can be recorded.

    Example:
        >>> result = memplan.layouts(model, images, world=8, device="rtx4090", optimizer=torch.optim.AdamW)
        >>> result.best.layout.title
        'DDP 8'
    """
    options = StepOptions(inputs, kwargs, targets, loss, optimizer, autocast, True, dtype).checked()
    target = choose_target(device, assume, cudnn, world, 0)
    return find_layouts(
        Subject(what, options), target, tuple(micro_batch), per_node=per_node, link=link, settings=settings
    )


def find_layouts(
    subject: Subject,
    target: Target,
    micro_batches: Sequence[int],
    *,
    per_node: int,
    link: float | None = None,
    settings: str | None = None,
    title: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Layouts:
    """Compare the layouts of ``target.world`` ranks: see `layouts`. ``progress`` gets each that is recorded."""
    card, world = target.card, target.world
    if card is None or world is None:
        raise InputError(f"device {target.name}", expected="a card, which a rank has to itself", do="Name one: h100")
    study = _Study(subject, target, card, world, per_node, link, settings)
    rows: list[LayoutBytes] = []
    too_large = set[Layout]()
    for layout in layouts_of(world, per_node, sorted(set(micro_batches))):
        alike = replace(layout, micro_batch=0)
        if alike in too_large:
            rows.append(study.unrecorded(layout, "a smaller micro-batch does not fit"))
            continue
        progress(f"{layout.title}, {layout.micro_batch} at a time")
        rows.append(study.row(layout))
        if not rows[-1].fits:
            too_large.add(alike)
    if study.errors and all(row.reason for row in rows):
        raise study.errors[0]
    rows.sort(key=_order)
    for number, row in enumerate(rows):
        if not row.fits or row.recorded:
            break
        progress(f"{row.layout.title}, whole")
        rows[number] = row = study.row(row.layout, whole=True)
        if row.fits:
            break
    rows.sort(key=_order)
    return Layouts(
        title or subject.title, target.name, world, per_node, card.capacity, study.blocks.number if study.blocks else 0,
        study.links, tuple(rows), study.notes,
    )  # fmt: skip


def _order(row: LayoutBytes) -> tuple[bool, float, int, float, int]:
    """Sort what fits by its rate; of what is as fast by these bounds, larger micro-batches first, which real kernels
    run better, then what sends less. Sort what does not fit by its need."""
    if not row.fits:
        return True, row.needs or math.inf, 0, 0.0, 0
    return False, -float(f"{row.rate:.3g}"), -row.layout.micro_batch, row.sending, row.needs


class _Study:
    """Records layouts of a module."""

    def __init__(
        self, subject: Subject, target: Target, card: Device, world: int, per_node: int, link: float | None,
        settings: str | None,
    ) -> None:  # fmt: skip
        self._subject, self._target, self._card = subject, target, card
        self._settings = settings
        self._make = Maker(subject.what, subject.arguments, subject.changes)
        try:
            with _torch.fake_tensors():
                model = self._make()
        except MemplanError:
            raise
        except Exception as error:  # the user's code
            raise StepError(
                f"{subject.title} raised {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                expected="a callable that makes a module",
                do="Mend it where it raises the same without memplan",
            ) from error
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{subject.title} makes {type(model).__name__}",
                expected="a module, which is sharded here",
                do="Name a callable that makes the module; memplan explain --world takes a build that shards by itself",
            )
        self.blocks: Blocks | None = blocks_of(model)
        self._parameters = sum(p.numel() for p in model.parameters())
        self._bytes = sum(
            p.numel() * (subject.options.dtype or p.dtype).itemsize  # pyright: ignore[reportAttributeAccessIssue]  # checked
            for p in model.parameters()
        )
        self._per_node = per_node
        self.links = within_machine(card)[0], round(link or between_machines(card)[0])
        self._flops: dict[bool, float] = {}
        """FLOPs of a step for each sample, by whether blocks are checkpointed."""
        self.errors: list[MemplanError] = []
        self.notes: tuple[str, ...] = ()
        self._few = self.blocks is not None and len(self.blocks.paths) == 1 and self.blocks.number > _FEW[1] + 1

    def row(self, layout: Layout, *, whole: bool = False) -> LayoutBytes:
        """Record a layout: all of the module, or some of its blocks."""
        held = self._held(layout)
        if held > self._card.capacity:
            return replace(self.unrecorded(layout, "weights and gradients alone do not fit"), needs=held)
        few = self._few and not whole
        recorded = [self._record(layout, number) for number in (_FEW if few else (None,))]
        figures = [one for one in recorded if isinstance(one, Bytes)]
        if len(figures) < len(recorded):
            error = next(one for one in recorded if isinstance(one, MemplanError))
            self.errors.append(error)
            return LayoutBytes(layout, 0, 0, 0, False, False, 0.0, 0.0, error.found)
        last = figures[-1]
        allocated = self._extrapolated([one.peak for one in figures])
        reserved, needs = (size + allocated - last.peak for size in (last.reserved, last.needs))
        return LayoutBytes(
            layout, allocated, reserved, needs, needs <= self._card.capacity, not few, self._compute(layout),
            self._sending(layout),
        )  # fmt: skip

    def unrecorded(self, layout: Layout, reason: str) -> LayoutBytes:
        """Return the row of a layout that was not recorded."""
        return LayoutBytes(layout, 0, 0, 0, False, False, self._compute(layout), self._sending(layout), reason)

    def _held(self, layout: Layout) -> int:
        """Return the bytes of a rank's weights, and of their gradients as large as these."""
        return 2 * self._bytes // layout.shards

    def _extrapolated(self, sizes: list[int]) -> int:
        """Return the bytes with all blocks, by a line through those with few."""
        if len(sizes) == 1:
            return sizes[0]
        assert self.blocks is not None, "only then are few recorded"
        (first, second), (low, high) = _FEW, sizes
        return high + (self.blocks.number - second) * (high - low) // (second - first)

    def _record(self, layout: Layout, number: int | None) -> Bytes | MemplanError:
        options = self._subject.options
        compute = options.autocast if isinstance(options.autocast, torch.dtype) and layout.shards > 1 else None
        dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None
        wrapped = Wrapped(self._make, layout, dtype, compute, self.blocks, number)
        subject = replace(self._subject, what=wrapped, arguments={}, changes=(), options=rank_options(options, layout))
        outcome = record_point(subject, self._target, self._settings)
        if number is None:
            self.notes = outcome.notes
        if outcome.bytes is not None:
            return outcome.bytes
        assert outcome.error is not None
        return outcome.error

    def _compute(self, layout: Layout) -> float:
        """Return the seconds of a step by its FLOPs."""
        if layout.checkpoint not in self._flops:
            counts = [
                self._counted(number, checkpointed=layout.checkpoint) for number in (_FEW if self._few else (None,))
            ]
            self._flops[layout.checkpoint] = self._extrapolated(counts)
        return layout.micro_batch * self._flops[layout.checkpoint] / self._rate()

    def _counted(self, number: int | None, *, checkpointed: bool) -> int:
        """Return the FLOPs of one sample's step with some of the blocks."""

        def make() -> nn.Module:
            model = self._make()
            if self.blocks is not None and number is not None:
                shortened(model, self.blocks, number)
            return checkpointed_blocks(model, self.blocks) if checkpointed else model

        options = replace(self._subject.options.with_batch(1), optimizer=None, autocast=None)
        try:
            return counted_flops(build_of(make, options))
        except Exception:  # the user's code: then there is no time to compare by
            return 0

    def _rate(self) -> float:
        """Return the FLOP/s of the dtype that products run in."""
        options, rates = self._subject.options, self._card.flops
        dtype = options.autocast or options.dtype or torch.float32
        name = str(dtype).removeprefix("torch.")
        return rates.get(name) or rates.get("float16") or rates["float32"]

    def _sending(self, layout: Layout) -> float:
        """Return the seconds of a step by what a rank sends, in rings: a gather or a reduction to shards of n bytes by
        r ranks sends n (r - 1) / r, a reduction to all twice that (NVIDIA/nccl-tests, PERFORMANCE.md)."""
        options = self._subject.options
        own = self._bytes
        half = layout.shards > 1 and options.autocast is not None
        sent = self._parameters * 2 if half else own
        reduced = self._parameters * 4 if half else own

        def ring(size: float, ranks: int, spread: int) -> float:
            return size * (ranks - 1) / ranks / (self.links[0] if spread <= self._per_node else self.links[1])

        seconds = 0.0
        ranks = layout.replicas * layout.shards
        if layout.shards > 1:
            gathers = 2 if layout.reshard else 1
            seconds += ring(gathers * sent + reduced, layout.shards, layout.shards)
        if layout.replicas > 1:
            seconds += ring(2 * reduced / layout.shards, layout.replicas, ranks)
        return seconds
