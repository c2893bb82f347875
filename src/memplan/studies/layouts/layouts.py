"""How to train a module with several cards (`memplan.layouts`): the bytes of each layout, and its time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from memplan._display import Displayed
from memplan._json import Saved, Unreadable, named
from memplan.devices.interconnects import between_machines, within_machine
from memplan.devices.model import Device
from memplan.errors import InputError, MemplanError, StepError, TargetError
from memplan.planning.graph.roofline import rates_of
from memplan.studies.axes.subject import Maker, Subject
from memplan.studies.layouts.blocks import Blocks, blocks_of
from memplan.studies.layouts.layout import Layout, layouts_of
from memplan.studies.layouts.tensor_parallel import TensorPlan, check_plan, losses_of_shards, tensor_parallel
from memplan.studies.layouts.wrapped import Wrapped, rank_options
from memplan.studies.step_time import exchanged_bytes, step_time
from memplan.studies.sweeps.points import record_point
from memplan.trace.naming.step_parts import Loss, Optimizer
from memplan.trace.record import construct
from memplan.trace.recording.session import Environment, Target, choose_target, public
from memplan.trace.step import StepOptions

_FEW = 3, 5
"""Numbers of blocks that are recorded of a module with more than six. From three on, each sharded block adds as many
bytes, as the next one's weights are gathered while one runs; two more, as blocks of two kinds may alternate."""


_OF_LAYOUT = ("replicas", "shards", "micro_batch", "reshard", "checkpoint", "tensor", "loss_parallel")
_OF_ROW = ("allocated", "reserved", "needs", "fits", "recorded", "flops", "compute", "sending", "exchanging", "reason",
           "passes")  # fmt: skip


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
    """Whether all of the module was recorded; else its figures are extrapolated from fewer blocks."""
    flops: int
    """FLOPs of a rank's step."""
    compute: float
    """Seconds of a rank's step by a roofline of its kernels (`memplan.studies.step_time`)."""
    sending: float
    """Seconds that a rank sends in a step, at the rate of its slowest link."""
    exchanging: float = 0.0
    """Seconds that the card waits for what ranks of a layer exchange, at the rate of the links within a machine."""
    reason: str = ""
    """Why it was not recorded; empty where it was."""
    passes: int = 1
    """Micro-batches that a rank's step accumulates."""

    @property
    def seconds(self) -> float:
        """Seconds of a step at least: shards and gradients are sent while the card computes; for exchanges it waits."""
        return max(self.compute + self.exchanging, self.sending)

    @property
    def rate(self) -> float:
        """Samples of all ranks a second, at most."""
        samples = self.layout.micro_batch * self.passes * self.layout.replicas * self.layout.shards
        return samples / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, repr=False)
class Layouts(Saved, Displayed):
    """The layouts of a module, those that fit first, the fastest of them first."""

    FORMAT: ClassVar[str] = "memplan.layouts"
    AGAIN: ClassVar[str] = "Compare the layouts again"

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
        """The fastest layout that fits, all of which was recorded; None if nothing fits."""
        return next((row for row in self.rows if row.fits), None)

    def _plain(self) -> dict[str, Any]:
        """Return the result as plain data for JSON. Each row has the fields of its layout next to its own."""
        fields = "title", "device", "world", "per_node", "capacity", "blocks", "links", "notes"
        rows = [named(row.layout, "title", *_OF_LAYOUT) | named(row, *_OF_ROW, "rate") for row in self.rows]
        return named(self, *fields) | {"rows": rows}

    @classmethod
    def _prepared(cls, plain: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a JSON file with the fields of each row's layout in a mapping of their own. Raises
        Unreadable."""
        stored, rows = plain.get("rows"), list[Any]()
        if not isinstance(stored, list):
            return plain  # whoever reads the fields says what is wrong
        for number, row in enumerate(stored):
            if not isinstance(row, dict):
                raise Unreadable("is no mapping").within(f"it.rows[{number}]")
            of_row = {name: row[name] for name in _OF_ROW if name in row}
            rows.append({"layout": {name: row[name] for name in _OF_LAYOUT if name in row}, **of_row})
        return {**plain, "rows": rows}


@public
def layouts(
    what: Any,
    *inputs: Any,
    world: int,
    device: str,
    micro_batch: Sequence[int] = (1,),
    tensor: Sequence[int] = (1,),
    tensor_plan: TensorPlan | None = None,
    loss_parallel: bool = False,
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
    """Compare ways to train a module with several cards: copies, shards, parts of layers, checkpoints, micro-batches.

    Each layout is one rank's training step under `DistributedDataParallel`, `fully_shard` or `parallelize_module` in a
    fake process group.
    Of a module with many equal blocks three and five are recorded, and the rest is extrapolated; the fastest layout
    that fits is recorded whole.

    Args:
        what: a module, or a callable that makes one.
        inputs, kwargs, targets, loss, optimizer, dtype, settings, assume, cudnn: as for `explain`.
        world: number of ranks.
        device: a card of the catalogue.
        micro_batch: samples of a rank at a time, to compare.
        tensor: ranks that share each layer, to compare: 1, 2, 4.
        tensor_plan: shares the layers of the module across a mesh of one dimension, in place (`parallelize_module`).
            Default: a plan for transformers of linear layers, with the sequence sharded between them.
        loss_parallel: also compare layouts whose ranks of a layer keep their shards of the logits, and compute the
            loss on them (`torch.distributed.tensor.parallel.loss_parallel`). A ``tensor_plan`` says by itself whether
            logits stay sharded: all of its layouts are then within that context.
        per_node: cards of a machine.
        link: bytes a second of a card to another machine, instead of the catalogue's.
        autocast: of copies; shards are gathered in this dtype instead (`MixedPrecisionPolicy`), and reduced in float32.

    Returns:
        The layouts, those that fit first, the fastest of them first.

    Raises:
        InputError: the world is no multiple of a machine's cards, or these none of ``tensor``; or the device is no
            card.
        TargetError: ``what`` makes no module.
        StepError: no layout can be recorded.

    Example:
        >>> result = memplan.layouts(model, images, world=8, device="rtx4090", optimizer=torch.optim.AdamW)
        >>> result.best.layout.title
        'FSDP2 8, kept'
    """
    options = StepOptions(
        inputs, kwargs, targets, loss, optimizer, autocast=autocast, train=True, dtype=dtype
    ).checked()
    target = choose_target(device, assume, cudnn, world, rank=0)
    return find_layouts(
        Subject(what, options), target, tuple(micro_batch), tensor=tuple(tensor), tensor_plan=tensor_plan,
        loss_parallel=loss_parallel, per_node=per_node, link=link, settings=settings,
    )  # fmt: skip


def find_layouts(
    subject: Subject,
    target: Target,
    micro_batches: Sequence[int],
    *,
    tensor: Sequence[int] = (1,),
    tensor_plan: TensorPlan | None = None,
    loss_parallel: bool = False,
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
    study = _Study(subject, target, card, tensor_plan, per_node, link, settings)
    rows: list[LayoutBytes] = []
    reasons: dict[Layout, str] = {}
    losses = (False,) if not loss_parallel else (False, True) if tensor_plan is None else (True,)
    for layout in layouts_of(world, per_node, sorted(set(micro_batches)), sorted(set(tensor)), losses):
        any_batch = replace(layout, micro_batch=0)  # the key of a layout with any micro-batch
        if any_batch in reasons:
            rows.append(study.unrecorded(layout, reasons[any_batch]))
            continue
        progress(f"{layout.title}, {layout.micro_batch} at a time")
        rows.append(row := study.row(layout))
        if not row.fits:
            reasons[any_batch] = row.reason or "a smaller micro-batch does not fit"
    if study.errors and all(row.reason for row in rows):
        raise study.errors[0]
    # Extrapolated reserved bytes are too high where fragments do not grow with the blocks.
    candidates = sorted((row for row in rows if row.allocated and row.allocated <= card.capacity), key=_speed)
    for row in candidates:
        if not row.recorded:
            progress(f"{row.layout.title}, whole")
            whole = study.row(row.layout, whole=True)
            rows[rows.index(row)] = row = whole
        if row.fits:
            break
    return Layouts(
        title or subject.title, target.name, world, per_node, card.capacity, study.blocks.number if study.blocks else 0,
        study.links, tuple(ranked(rows)), study.notes,
    )  # fmt: skip


def ranked(rows: Sequence[LayoutBytes]) -> list[LayoutBytes]:
    """Return rows in the order of `Layouts.rows`: those that fit first, the fastest first; of others the smallest
    first."""
    fitting = sorted((row for row in rows if row.fits), key=_speed)
    others = (row for row in rows if not row.fits)
    return [*fitting, *sorted(others, key=lambda row: row.needs or math.inf)]  # 0: it was not recorded


def _speed(row: LayoutBytes) -> tuple[float, ...]:
    """Return the key by which rows are sorted: by rate, the fastest first.

    At equal rates, larger micro-batches come first, as real kernels run them better; then layouts that send less.
    """
    return -float(f"{row.rate:.3g}"), -row.layout.micro_batch, row.sending, row.needs


@dataclass(frozen=True)
class _Figures:
    """Peaks and work of a recorded rank, in bytes and seconds of its kernels."""

    allocated: int
    reserved: int
    needs: int
    """With the CUDA context."""
    flops: int
    seconds: float
    exchanged: float
    """Bytes that a rank sends to those of the same layers."""


class _Study:
    """Records layouts of a module on a card."""

    def __init__(
        self, subject: Subject, target: Target, card: Device, tensor_plan: TensorPlan | None, per_node: int,
        link: float | None, settings: str | None,
    ) -> None:  # fmt: skip
        """Make the module without values, to find its blocks and the sizes of its weights.

        Raises:
            StepError: the callable raises.
            TargetError: it makes no module.
        """
        self._subject, self._target, self._card = subject, target, card
        self._settings = settings
        self._make = Maker(subject.what, subject.arguments, subject.changes)
        """Makes the module, with the subject's changes."""
        model = _construct(self._make, target)
        if not isinstance(model, nn.Module):
            raise TargetError(
                f"{subject.title} makes {type(model).__name__}",
                expected="a module, which is sharded here",
                do="Name a callable that makes the module; memplan explain --world takes a build that shards by itself",
            )
        self.blocks: Blocks | None = blocks_of(model)
        """The repeated blocks; None if the module has none."""
        self._weights = _sizes(model, subject.options)
        """Number and bytes of the weights, and of those that are trained."""
        self._tensor_plan = tensor_plan
        self._refused = functools.cache(
            lambda ranks, loss: None if tensor_plan else _why_not(model, self.blocks, ranks, loss_parallel=loss)
        )
        """By number of ranks that share layers, and whether they share the loss: why not, or None."""
        self._per_node = per_node
        self.links = within_machine(card)[0], round(link or between_machines(card)[0])
        """Bytes a second between two cards of a machine, and of a card to another machine."""
        self.errors: list[MemplanError] = []
        """Of the layouts that could not be recorded."""
        self.notes: tuple[str, ...] = ()
        """Notes of the last recording."""
        self._few = self.blocks is not None and self.blocks.alike and self.blocks.number > _FEW[1] + 1
        """Whether to record the module with few of its blocks, as they are alike."""

    def row(self, layout: Layout, *, whole: bool = False) -> LayoutBytes:
        """Record a layout: all of the module, or some of its blocks."""
        if layout.tensor > 1 and (error := self._refused(layout.tensor, layout.loss_parallel)) is not None:
            self.errors.append(error)
            return self.unrecorded(layout, error.found)
        least = self._weights.least // (layout.shards * layout.tensor)
        if least > self._card.capacity:
            return replace(self.unrecorded(layout, "weights and gradients alone do not fit"), needs=least)
        few = self._few and not whole
        recordings: list[_Figures] = []
        for number in _FEW if few else (None,):
            recording = self._record(layout, number)
            if isinstance(recording, MemplanError):
                if few:  # a module may need all of its blocks: a list of skips, a loop over a fixed number of blocks
                    self._few = False
                    return self.row(layout)
                self.errors.append(recording)
                return self.unrecorded(layout, recording.found)
            recordings.append(recording)
        last = recordings[-1]
        allocated = round(self._extrapolated([recording.allocated for recording in recordings]))
        reserved, needs = (size + allocated - last.allocated for size in (last.reserved, last.needs))
        return LayoutBytes(
            layout,
            allocated,
            reserved,
            needs,
            fits=needs <= self._card.capacity,
            recorded=not few,
            flops=round(self._extrapolated([recording.flops for recording in recordings])),
            compute=self._extrapolated([recording.seconds for recording in recordings]),
            sending=self._sending(layout),
            exchanging=self._extrapolated([recording.exchanged for recording in recordings]) / self.links[0],
        )

    def unrecorded(self, layout: Layout, reason: str) -> LayoutBytes:
        """Return the row of a layout that was not recorded. ``reason``: why."""
        return LayoutBytes(
            layout, allocated=0, reserved=0, needs=0, fits=False, recorded=False, flops=0, compute=0.0,
            sending=self._sending(layout), reason=reason,
        )  # fmt: skip

    def _extrapolated(self, values: Sequence[float]) -> float:
        """Return the value with all blocks, by a line through the values with a few blocks (`_FEW`)."""
        if len(values) == 1:
            return values[0]
        assert self.blocks is not None, "only then are few recorded"
        (first, second), (low, high) = _FEW, values
        return high + (self.blocks.number - second) * (high - low) / (second - first)

    def _record(self, layout: Layout, number: int | None) -> _Figures | MemplanError:
        """Record a layout with ``number`` blocks (None: all). Return its figures, or the error of the recording."""
        options = self._subject.options
        # shards are gathered in the dtype of autocast
        compute = options.autocast if isinstance(options.autocast, torch.dtype) and layout.shards > 1 else None
        dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None
        parallelize = self._tensor_plan or functools.partial(
            tensor_parallel, blocks=self.blocks, loss_parallel=layout.loss_parallel
        )
        wrapped = Wrapped(self._make, layout, dtype, compute, self.blocks, number, parallelize)
        subject = replace(self._subject, what=wrapped, arguments={}, changes=(), options=rank_options(options, layout))
        with losses_of_shards() if layout.loss_parallel else nullcontext():
            outcome = record_point(subject, self._target, self._settings, keep=True)
        if outcome.bytes is None:
            assert outcome.error is not None
            return outcome.error
        assert outcome.trace is not None
        self.notes = outcome.notes
        time = step_time(outcome.trace, rates_of(self._card))
        flops, seconds = (time.flops, time.seconds) if time is not None else (0, 0.0)
        exchanged = exchanged_bytes(outcome.trace) * (layout.tensor - 1) / layout.tensor
        return _Figures(outcome.bytes.peak, outcome.bytes.reserved, outcome.bytes.needs, flops, seconds, exchanged)

    def _sending(self, layout: Layout) -> float:
        """Return the seconds that a rank sends in a step, in rings of ranks.

        A gather or a reduction to shards of n bytes by r ranks sends n (r - 1) / r, a reduction to all twice that
        (NVIDIA/nccl-tests, PERFORMANCE.md).
        """
        # under autocast shards are gathered in 2 bytes an element, and gradients reduced in float32
        half = layout.shards > 1 and self._subject.options.autocast is not None
        sent = self._weights.number * 2 if half else self._weights.bytes
        reduced = self._weights.trained_number * 4 if half else self._weights.trained_bytes

        def ring(size: float, ranks: int, spread: int) -> float:
            """Return the seconds of a ring of ``ranks`` ranks, which lie within ``spread`` consecutive ranks."""
            rate = self.links[0] if spread <= self._per_node else self.links[1]
            return size / layout.tensor * (ranks - 1) / ranks / rate

        seconds = 0.0
        if layout.shards > 1:
            gathers = 2 if layout.reshard else 1
            seconds += ring(gathers * sent + reduced, layout.shards, layout.shards * layout.tensor)
        if layout.replicas > 1:
            seconds += ring(2 * reduced / layout.shards, layout.replicas, math.prod(layout.mesh))
        return seconds


def _construct(make: Maker, target: Target) -> Any:
    """Return what a callable constructs, on fake tensors. Its exceptions become errors that name it."""
    try:
        return construct(make, target)
    except StepError as error:
        if not error.found.startswith("build raised "):
            raise
        raise StepError(
            make.title + error.found.removeprefix("build"), expected="a callable that makes a module",
            do="Mend it where it raises the same without memplan", where=error.where,
        ) from error.__cause__  # fmt: skip


def _why_not(model: nn.Module, blocks: Blocks | None, ranks: int, *, loss_parallel: bool) -> MemplanError | None:
    """Return the error that `tensor_parallel` would raise for this number of ranks; None if it would not."""
    try:
        check_plan(model, blocks, ranks, loss_parallel=loss_parallel)
    except MemplanError as error:
        return error
    return None


@dataclass(frozen=True)
class _Weights:
    """Numbers and bytes of a module's parameters, and of those that are trained."""

    number: int
    bytes: int
    trained_number: int
    trained_bytes: int

    @property
    def least(self) -> int:
        return self.bytes + self.trained_bytes


def _sizes(model: nn.Module, options: StepOptions) -> _Weights:
    """Return the sizes of a module's parameters, in the dtype that the options convert them to."""

    dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None

    def itemsize(parameter: nn.Parameter) -> int:
        return (dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype).itemsize

    def total(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
        sizes = [(parameter.numel(), parameter.numel() * itemsize(parameter)) for parameter in parameters]
        return sum(number for number, _ in sizes), sum(size for _, size in sizes)

    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return _Weights(*total(model.parameters()), *total(trained))
