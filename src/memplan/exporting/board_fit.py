"""What of a model can be trained on a microcontroller: its banks of SRAM, its flash, what the application needs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from memplan._json import Written
from memplan.devices.boards import Bank, Board
from memplan.errors import BudgetError, InputError
from memplan.exporting.device_plan import Narrow, Stored, largest_input, planned_step, state_and_inputs
from memplan.exporting.export import captured_passes, device_copy, train_only
from memplan.exporting.frozen_int8 import Int8Step, calibration_samples, int8_step
from memplan.exporting.int8_training import check_rules
from memplan.exporting.optimizer_rules import Gradients, UpdateRules, update_rules
from memplan.exporting.source.program_text import constants_bytes
from memplan.exporting.step_outputs import CapturedStep, DeviceStep, Normalization
from memplan.exporting.trials.cortex import flash_bytes
from memplan.planning.request import Request
from memplan.planning.request import request as make_request
from memplan.planning.settings import PlanOptions
from memplan.trace.naming.step_parts import optimizer_of
from memplan.trace.recording.session import undisturbed
from memplan.trace.step import StepOptions

_NAME = "net"
INT_OF_AVR = 2
"""Bytes of an int and of a pointer where constants are copied into SRAM."""


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """Parameters that could be trained, and the memory that a step takes which trains them alone."""

    what: str
    """Such as "last 2 layers"."""
    parameters: tuple[str, ...]
    """Their names in the model."""
    weights: int
    """Number of elements that are trained."""
    ram: int
    """Bytes of arena, state, inputs and, if the board copies them into SRAM, constants, without the reserve: of the
    plan, or of the smallest one where none fits."""
    arena: int
    """0 where state, inputs and reserve alone do not fit: then nothing is planned."""
    state: int
    """Bytes of weights, optimizer state and statistics."""
    inputs: int
    flash: int | None
    """Bytes of weights and other constant tensors, with tables where constants lie in SRAM; None where no plan fits."""
    code: int | None
    """Bytes of code without libm; None where no plan fits or no cross compiler for the core was found."""
    banks: Mapping[str, str]
    """Name of the bank of each of arena, state, inputs and reserve, and of constants if the board copies them into
    SRAM; empty where no plan fits."""
    lacks: str
    """What there is not enough of, SRAM or flash, or why weights cannot be in eight bits: then RAM is not known, and 0.
    Empty if it fits."""
    trained_weights: Narrow = "float32"
    """Type of the trained weights."""
    constants: int = 0
    """Bytes of constants in SRAM: weights and tables, if the board copies them there."""
    input_in_arena: bool = False
    """Whether the largest input lies in the arena: then `inputs` are those besides."""
    frozen_layers: Narrow = "float32"
    """How layers before the first trained one compute."""
    frozen_error: str = ""
    """What eight bits do to these layers and to the loss on the calibration data; empty in float32."""

    @property
    def budget(self) -> int:
        """Bytes of the budget of `memplan.export`, which does not count constants."""
        return self.ram - self.constants

    @property
    def means(self) -> tuple[str, ...]:
        """What makes the step smaller, such as "input in the arena"."""
        means = {
            "weights in eight bits": self.trained_weights == "int8",
            "input in the arena": self.input_in_arena,
            "frozen layers in eight bits": self.frozen_layers == "int8",
        }
        return tuple(words for words, used in means.items() if used)

    @property
    def fits(self) -> bool:
        """Whether it fits into SRAM and flash."""
        return not self.lacks

    @property
    def in_one_bank(self) -> bool:
        """Whether arena and state are in the same bank."""
        return self.banks.get("arena") == self.banks.get("state")


@dataclass(frozen=True)
class BoardFit(Written):
    """What of a model can be trained on a board."""

    FORMAT: ClassVar[str] = "memplan.board_fit"
    DERIVED: ClassVar[tuple[str, ...]] = ("fits",)

    model: str
    board: Board
    reserve: int
    """Bytes of SRAM that the application needs besides."""
    head: str
    """Name of the last layer with trained parameters."""
    parts: tuple[TrainedPart, ...]
    """From all layers to the head alone."""
    calibrated: bool = False
    """Whether there was data to compute frozen layers in eight bits."""

    @property
    def best(self) -> TrainedPart | None:
        """The part with the most trained weights that fits, of several the most exact; None if none does."""
        fitting = (part for part in self.parts if part.fits)
        return max(fitting, key=lambda part: part.weights, default=None)  # of several the first

    @property
    def fits(self) -> bool:
        """Whether anything can be trained on the board."""
        return self.best is not None


def fit_on_board(
    model: Any, step: StepOptions, board: Board, *, reserve: int = 0, gradients: Gradients | None = None,
    normalization: Normalization | None = None, trained_weights: Narrow = "float32", calibrate: Any = None,
) -> BoardFit:  # fmt: skip
    """Plan steps that train all layers of a model, its last ones, biases and head, and the head alone.

    The model is not changed. Each step is planned as `memplan.export` plans it, with the arena in the largest bank that
    state, inputs and reserve leave. A part that lacks SRAM is planned again, until it fits: with the largest input in
    the arena; then, with calibration data, with the layers before the first trained one in eight bits, too; on a board
    with several banks, with these layers in eight bits alone. A part that lacks flash is planned with these layers in
    eight bits. If nothing fits, the last of these plans follows the plain one.

    Args:
        model: a module with parameters in float32, or a callable that returns one.
        step: inputs, targets, loss and optimizer.
        board: the microcontroller.
        reserve: bytes of SRAM for stack, buffers and everything else of the application.
        gradients: what happens to them before an update.
        normalization: of inputs of eight bits.
        trained_weights: ``"int8"``: a part that does not fit is planned with trained weights in eight bits, too.
        calibrate: batches of inputs and targets, on whose ranges layers before the first trained one can be computed in
            eight bits; None: they stay in float32.

    Raises:
        InputError: there is no optimizer, or it cannot train weights of eight bits, or the model cannot be exported, or
            a batch does not fit the step.
        UsageError: ``calibrate`` is no iterable of batches.
        RecordingError: an operation has no kernel.
    """
    if step.optimizer is None:
        raise InputError("No optimizer", expected="the one that trains on the device", do="Give --optimizer sgd:lr=0.1")
    optimizer: Any = optimizer_of(step.optimizer)
    copied = device_copy(model)
    with undisturbed(real=True):
        request = make_request(copied, step, PlanOptions(budget=board.sram), fake=False)
        request = replace(request, step=DeviceStep.of(request.step, normalization))
        samples = None if calibrate is None else calibration_samples(request, calibrate)
        original = model if isinstance(model, nn.Module) else copied
        rules = update_rules(optimizer, request.model, original, gradients)
        if trained_weights == "int8":
            check_rules(rules)
        train_only(request.model, rules.group_of)
        study = _Study(request, *captured_passes(request), rules, board, reserve, trained_weights == "int8", samples)
        head = study.layers[-1] or "the model itself"
        return BoardFit(type(copied).__name__, board, reserve, head, tuple(study.parts()), samples is not None)


def arena_room(banks: Sequence[Bank], sizes: Collection[int]) -> int:
    """Return the largest size in bytes of an arena in one bank, after arrays of these sizes were put into the banks; -1
    if the arrays do not fit.

    Example:
        >>> arena_room([Bank("A", 100), Bank("B", 50)], [40, 20])
        80
    """
    return max((max(left) for _, left in _placings(banks, sizes)), default=-1)


def placed(banks: Sequence[Bank], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the name of the bank of each array, by the array's name, with as few banks as possible; {} if the arrays
    do not fit. ``sizes`` has bytes by name.

    Example:
        >>> placed([Bank("A", 100), Bank("B", 50)], {"arena": 80, "state": 30, "inputs": 10})
        {'arena': 'A', 'state': 'B', 'inputs': 'A'}
    """
    choices = [chosen for chosen, _ in _placings(banks, sizes.values())]
    if not choices:
        return {}
    fewest = min(choices, key=lambda chosen: len(set(chosen)))
    return {name: banks[index].name for name, index in zip(sizes, fewest, strict=True)}


def _placings(banks: Sequence[Bank], sizes: Collection[int]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield each assignment of arrays to banks that fits: (index of each array's bank, bytes left in each bank)."""
    for chosen in itertools.product(range(len(banks)), repeat=len(sizes)):
        left = [bank.bytes for bank in banks]
        for at, size in zip(chosen, sizes, strict=True):
            left[at] -= size
        if min(left) >= 0:
            yield chosen, left


@dataclass(frozen=True, slots=True)
class _Way:
    """What can make the step of a part smaller."""

    trained: Narrow = "float32"
    """Type of the trained weights."""
    input: str = ""
    """Position, as a text, of the input that lies in the arena; empty if none does."""
    frozen: Narrow = "float32"
    """How layers before the first trained one compute."""


_WIDE, _NARROW = _Way(), _Way("int8")


@dataclass(frozen=True, slots=True)
class _Variant:
    """The captured passes of a part in one way."""

    captured: CapturedStep
    infer: CapturedStep
    rules: UpdateRules
    stored: Stored
    error: str = ""
    """What eight bits do to the frozen layers; empty if there are none in eight bits."""

    @property
    def arguments(self) -> tuple[CapturedStep, CapturedStep, UpdateRules, Stored]:
        """What `planned_step` takes after the request."""
        return self.captured, self.infer, self.rules, self.stored


@dataclass(frozen=True)
class _Study:
    """The captured step, planned for one set of parameters after another."""

    request: Request
    captured: CapturedStep
    infer: CapturedStep
    rules: UpdateRules
    board: Board
    reserve: int
    """Bytes of RAM left to the rest of the program."""
    eight_bits: bool
    """Whether parts that do not fit are planned with weights in eight bits, too."""
    samples: list[tuple[torch.Tensor, ...]] | None
    """Calibration data of layers before the first trained one: the tensors of a call of the step for each sample."""
    quantized: dict[tuple[str, ...], Int8Step | None] = field(default_factory=dict)
    """Steps with frozen layers in eight bits, by the names of the trained parameters; None: no layer is before them."""

    @property
    def trained(self) -> list[str]:
        """Names of all parameters that can be trained, in the model's order."""
        return [path for path, _ in self.request.model.named_parameters() if path in self.rules.group_of]

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have some, in the model's order."""
        return list(dict.fromkeys(path.rpartition(".")[0] for path in self.trained))

    @cached_property
    def input(self) -> str:
        """Position, as a text, of the input that can lie in the arena; empty if none can."""
        try:
            return largest_input(self.request)
        except InputError:
            return ""

    def parts(self) -> Iterator[TrainedPart]:
        """Yield all layers, last ones until they fit, biases and head, the head: each as `_rows` has it."""
        trained, layers = self.trained, self.layers
        rows = self._rows(f"all {len(layers)} layers" if len(layers) > 1 else "the layer", trained)
        yield from rows
        seen, count = {rows[0].parameters}, len(layers)
        while not any(_as_exact(row) for row in rows) and count > 3:
            count //= 2
            rows = self._rows(f"last {count} layers", _within(trained, layers[-count:]))
            seen.add(rows[0].parameters)
            yield from rows
        of_head = _within(trained, layers[-1:])
        biases = [path for path in trained if path in of_head or path.rpartition(".")[2] == "bias"]
        for what, paths in (("biases and head", biases), ("head alone", of_head)):
            if tuple(paths) not in seen:
                yield from self._rows(what, paths)
                seen.add(tuple(paths))

    def _rows(self, what: str, paths: Sequence[str]) -> list[TrainedPart]:
        """Return the part that trains parameters of these names in float32, as `_of_ways` does. If none fits, the same
        follows for trained weights in eight bits, if they make the state smaller."""
        rows = self._of_ways(what, paths, _WIDE)
        if self.eight_bits and not any(row.fits for row in rows):
            part, narrow = rows[0], self._step(paths, _NARROW)
            try:
                state = self._sizes(narrow)[0]
            except InputError as error:  # weights without a range, such as zeros: in float32 the sizes were known
                failed = TrainedPart(
                    what, part.parameters, part.weights, ram=0, arena=0, state=0, inputs=part.inputs, flash=None,
                    code=None, banks={}, lacks=error.found, trained_weights="int8",
                )  # fmt: skip
                return [*rows, failed]
            if state < part.state:
                rows += self._of_ways(what, paths, _NARROW)
        return rows

    def _of_ways(self, what: str, paths: Sequence[str], way: _Way) -> list[TrainedPart]:
        """Return the part as it is and, if it does not fit, the first of `_smaller_ways` that does, else the last."""
        whole = self._part(what, paths, way, self._step(paths, way))
        if whole.fits:
            return [whole]
        failed = list[TrainedPart]()
        for smaller in self._smaller_ways(way, whole.lacks):
            variant = self._step(paths, smaller)
            if smaller.frozen == "int8" and not variant.error:  # no layer is before the first trained one
                continue
            if smaller.frozen == "float32" and not self._may_fit(whole, variant):
                continue
            row = self._part(what, paths, smaller, variant)
            if row.fits:
                return [whole, row]
            failed = [row]
        return [whole, *failed]

    def _smaller_ways(self, way: _Way, lacks: str) -> Iterator[_Way]:
        """Yield the ways that may save what lacks: for SRAM the input in the arena, for SRAM and flash frozen layers in
        eight bits. With several banks, the input may fit only outside of the arena, which is in one."""
        with_input = replace(way, input=self.input) if lacks == "SRAM" and self.input else way
        if with_input.input:
            yield with_input
        if self.samples is not None:
            yield replace(with_input, frozen="int8")
            if with_input.input and len(self.board.banks) > 1:
                yield replace(way, frozen="int8")

    def _may_fit(self, part: TrainedPart, variant: _Variant) -> bool:
        """Return whether the smallest arena of a part that does not fit would fit beside another variant's arrays: with
        the input in it, it is no smaller."""
        state, inputs, _ = self._sizes(variant)
        fixed = {"state": state, "inputs": inputs, "reserve": self.reserve, "constants": part.constants}
        return part.arena <= arena_room(self.board.banks, fixed.values())

    def _part(self, what: str, paths: Sequence[str], way: _Way, variant: _Variant) -> TrainedPart:
        """Plan the step that trains parameters of these names."""
        state, inputs, weights = self._sizes(variant)
        sizes = {path: parameter.numel() for path, parameter in self.request.model.named_parameters()}
        count = sum(sizes[path] for path in paths)
        part = TrainedPart(
            what, tuple(paths), count, ram=0, arena=0, state=state, inputs=inputs, flash=None, code=None, banks={},
            lacks="", trained_weights=way.trained, input_in_arena=bool(way.input), frozen_layers=way.frozen,
            frozen_error=variant.error,
        )  # fmt: skip
        fixed = {"state": state, "inputs": inputs, "reserve": self.reserve}
        if not self.board.constants_in_sram:
            return self._planned(part, variant, fixed)
        part = replace(part, constants=weights)
        while True:  # the tables are known from a plan, and one in less room may have more of them
            planned = self._planned(part, variant, fixed | {"constants": part.constants})
            if planned.flash is None or planned.flash <= part.constants:
                return planned
            part = replace(part, constants=planned.flash)

    def _planned(self, part: TrainedPart, variant: _Variant, fixed: Mapping[str, int]) -> TrainedPart:
        """Plan the step of a part, beside arrays of fixed sizes: bytes of state, inputs and reserve, by name."""
        state, inputs = part.state, part.inputs
        outside = state + inputs + part.constants
        room = arena_room(self.board.banks, fixed.values())
        if room < 0:  # the other arrays alone do not fit
            return replace(part, ram=outside, arena=0, banks={}, flash=None, code=None, lacks="SRAM")
        request = replace(self.request, budget=state + inputs + room)
        try:
            layout = planned_step(_NAME, request, *variant.arguments).layout
        except BudgetError as error:
            arena = error.smallest_budget - state - inputs
            return replace(part, ram=outside + arena, arena=arena, banks={}, flash=None, code=None, lacks="SRAM")
        banks = placed(self.board.banks, {"arena": layout.arena, **fixed})
        part = replace(part, ram=layout.arena + outside, arena=layout.arena, banks=banks)
        flash = layout.memory.flash + layout.constants
        if self.board.constants_in_sram:
            flash = constants_bytes(layout, INT_OF_AVR)
        whole = flash_bytes(self.board.core, layout)
        code = None if whole is None else whole - flash
        lacks = "flash" if self.board.flash is not None and (whole or flash) > self.board.flash else ""
        return replace(part, flash=flash, code=code, lacks=lacks)

    def _step(self, paths: Collection[str], way: _Way) -> _Variant:
        """Return the captured passes of a step that trains parameters of these names, its rules, and where its weights
        lie."""
        rules = replace(self.rules, group_of={path: self.rules.group_of[path] for path in paths})
        stored = Stored(trained=way.trained, arena_apart=len(self.board.banks) > 1, arena_input=way.input)
        if way.frozen == "int8":
            quantized = self._int8_step(tuple(paths))
            if quantized is not None:
                return _Variant(*quantized.captured, rules, stored, str(quantized.report))
        graph = self.captured.graph
        gradients = tuple(pair for pair in graph.gradients if graph.values[pair[0]].path in paths)
        captured = replace(self.captured, graph=replace(graph, gradients=gradients))
        return _Variant(captured, self.infer, rules, stored)

    def _int8_step(self, paths: tuple[str, ...]) -> Int8Step | None:
        """Return the step that trains parameters of these names, with the layers before them in eight bits."""
        if paths not in self.quantized:
            with self._training_only(paths):  # what is frozen is seen while the step is captured
                passes = captured_passes(self.request)
            self.quantized[paths] = int8_step(self.request, passes, self.samples)
        return self.quantized[paths]

    @contextmanager
    def _training_only(self, paths: Collection[str]) -> Iterator[None]:
        """Within this context parameters of these names require a gradient, afterwards all that can be trained."""
        train_only(self.request.model, paths)
        try:
            yield
        finally:
            train_only(self.request.model, self.rules.group_of)

    def _sizes(self, variant: _Variant) -> tuple[int, int, int]:
        """Return the bytes of the state, of the inputs and of the weights in flash of a step."""
        return state_and_inputs(self.request, *variant.arguments)


def _as_exact(part: TrainedPart) -> bool:
    """Return whether a part fits and computes in float32 alone."""
    return part.fits and (part.trained_weights, part.frozen_layers) == ("float32", "float32")


def _within(paths: Collection[str], layers: Collection[str]) -> list[str]:
    """Return those of the parameters' names that belong to these layers themselves."""
    return [path for path in paths if path.rpartition(".")[0] in layers]
