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
from memplan.exporting.device_plan import StorageOptions, WeightType, largest_input, planned_step, state_and_inputs
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
    trained_weights: WeightType = "float32"
    """Type of the trained weights."""
    constants: int = 0
    """Bytes of constants in SRAM: weights and tables, if the board copies them there."""
    input_in_arena: bool = False
    """Whether the largest input lies in the arena: then `inputs` are those besides."""
    frozen_layers: WeightType = "float32"
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
        return max(fitting, key=lambda part: part.weights, default=None)  # of several the first, which is most exact

    @property
    def fits(self) -> bool:
        """Whether anything can be trained on the board."""
        return self.best is not None


def fit_on_board(
    model: Any, step: StepOptions, board: Board, *, reserve: int = 0, gradients: Gradients | None = None,
    normalization: Normalization | None = None, trained_weights: WeightType = "float32", calibrate: Any = None,
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
    return max((max(bytes_left) for _, bytes_left in _placings(banks, sizes)), default=-1)


def placed(banks: Sequence[Bank], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the name of the bank of each array, by the array's name, with as few banks as possible; {} if the arrays
    do not fit. ``sizes`` has bytes by name.

    Example:
        >>> placed([Bank("A", 100), Bank("B", 50)], {"arena": 80, "state": 30, "inputs": 10})
        {'arena': 'A', 'state': 'B', 'inputs': 'A'}
    """
    assignments = [assignment for assignment, _ in _placings(banks, sizes.values())]
    if not assignments:
        return {}
    fewest_banks = min(assignments, key=lambda assignment: len(set(assignment)))
    return {name: banks[index].name for name, index in zip(sizes, fewest_banks, strict=True)}


def _placings(banks: Sequence[Bank], sizes: Collection[int]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield each assignment of arrays to banks that fits: (index of each array's bank, bytes left in each bank)."""
    for assignment in itertools.product(range(len(banks)), repeat=len(sizes)):
        bytes_left = [bank.bytes for bank in banks]
        for bank, size in zip(assignment, sizes, strict=True):
            bytes_left[bank] -= size
        if min(bytes_left) >= 0:
            yield assignment, bytes_left


@dataclass(frozen=True, slots=True)
class _Savings:
    """What makes the step of a part smaller."""

    trained: WeightType = "float32"
    """Type of the trained weights."""
    input: str = ""
    """Position, as a text, of the input that lies in the arena; empty if none does."""
    frozen: WeightType = "float32"
    """How layers before the first trained one compute."""


_IN_FLOAT32, _IN_INT8 = _Savings(), _Savings(trained="int8")


@dataclass(frozen=True, slots=True)
class _Variant:
    """The captured passes of a part with some savings."""

    captured: CapturedStep
    infer: CapturedStep
    rules: UpdateRules
    stored: StorageOptions
    frozen_error: str = ""
    """What eight bits do to the frozen layers; empty if there are none in eight bits."""

    @property
    def arguments(self) -> tuple[CapturedStep, CapturedStep, UpdateRules, StorageOptions]:
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
    tries_int8_weights: bool
    """Whether parts that do not fit are planned with trained weights in eight bits, too."""
    samples: list[tuple[torch.Tensor, ...]] | None
    """Calibration data of layers before the first trained one: the tensors of a call of the step for each sample."""
    int8_steps: dict[tuple[str, ...], Int8Step | None] = field(default_factory=dict)
    """Steps with frozen layers in eight bits, by the names of the trained parameters; None: no layer is before them."""

    @property
    def trainable(self) -> list[str]:
        """Names of all parameters that can be trained, in the model's order."""
        return [path for path, _ in self.request.model.named_parameters() if path in self.rules.group_of]

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have such parameters, in the model's order."""
        return list(dict.fromkeys(path.rpartition(".")[0] for path in self.trainable))

    @cached_property
    def arena_input(self) -> str:
        """Position, as a text, of the input that can lie in the arena; empty if none can."""
        try:
            return largest_input(self.request)
        except InputError:
            return ""

    def parts(self) -> Iterator[TrainedPart]:
        """Yield all layers, last ones until they fit, biases and head, the head: each as `_rows` has it."""
        trainable, layers = self.trainable, self.layers
        rows = self._rows(f"all {len(layers)} layers" if len(layers) > 1 else "the layer", trainable)
        yield from rows
        planned, count = {rows[0].parameters}, len(layers)
        while not any(_as_exact(row) for row in rows) and count > 3:
            count //= 2
            rows = self._rows(f"last {count} layers", _within(trainable, layers[-count:]))
            planned.add(rows[0].parameters)
            yield from rows
        of_head = _within(trainable, layers[-1:])
        biases_and_head = [path for path in trainable if path in of_head or path.rpartition(".")[2] == "bias"]
        for what, paths in (("biases and head", biases_and_head), ("head alone", of_head)):
            if tuple(paths) not in planned:
                yield from self._rows(what, paths)
                planned.add(tuple(paths))

    def _rows(self, what: str, paths: Sequence[str]) -> list[TrainedPart]:
        """Return the part that trains parameters of these names in float32, as `_with_savings` does. If none fits, the
        same follows for trained weights in eight bits, if they make the state smaller."""
        rows = self._with_savings(what, paths, _IN_FLOAT32)
        if self.tries_int8_weights and not any(row.fits for row in rows):
            part, in_int8 = rows[0], self._step(paths, _IN_INT8)
            try:
                int8_state, _, _ = self._sizes(in_int8)
            except InputError as error:  # weights without a range, such as zeros: in float32 the sizes were known
                failed = TrainedPart(
                    what, part.parameters, part.weights, ram=0, arena=0, state=0, inputs=part.inputs, flash=None,
                    code=None, banks={}, lacks=error.found, trained_weights="int8",
                )  # fmt: skip
                return [*rows, failed]
            if int8_state < part.state:
                rows += self._with_savings(what, paths, _IN_INT8)
        return rows

    def _with_savings(self, what: str, paths: Sequence[str], savings: _Savings) -> list[TrainedPart]:
        """Return the part with these savings and, if it does not fit, with the first of `_more_savings` with which it
        does, else with the last."""
        part = self._part(what, paths, savings, self._step(paths, savings))
        if part.fits:
            return [part]
        failed = list[TrainedPart]()
        for more in self._more_savings(savings, part.lacks):
            variant = self._step(paths, more)
            if more.frozen == "int8" and not variant.frozen_error:  # no layer is before the first trained one
                continue
            if more.frozen == "float32" and not self._may_fit(part, variant):
                continue
            smaller = self._part(what, paths, more, variant)
            if smaller.fits:
                return [part, smaller]
            failed = [smaller]
        return [part, *failed]

    def _more_savings(self, savings: _Savings, lacks: str) -> Iterator[_Savings]:
        """Yield what may save what lacks: for SRAM the input in the arena, for SRAM and flash frozen layers in eight
        bits. With several banks, the input may fit only outside of the arena, which is in one."""
        with_input = replace(savings, input=self.arena_input) if lacks == "SRAM" and self.arena_input else savings
        if with_input.input:
            yield with_input
        if self.samples is not None:
            yield replace(with_input, frozen="int8")
            if with_input.input and len(self.board.banks) > 1:
                yield replace(savings, frozen="int8")

    def _may_fit(self, part: TrainedPart, variant: _Variant) -> bool:
        """Return whether the smallest arena of a part that does not fit would fit beside the arrays of a variant with
        the input in the arena: the arena of that is no smaller."""
        state, inputs, _ = self._sizes(variant)
        other_arrays = (state, inputs, self.reserve, part.constants)
        return part.arena <= arena_room(self.board.banks, other_arrays)

    def _part(self, what: str, paths: Sequence[str], savings: _Savings, variant: _Variant) -> TrainedPart:
        """Plan the step that trains parameters of these names."""
        state, inputs, flash_weights = self._sizes(variant)
        sizes = {path: parameter.numel() for path, parameter in self.request.model.named_parameters()}
        part = TrainedPart(
            what, tuple(paths), weights=sum(sizes[path] for path in paths), ram=0, arena=0, state=state, inputs=inputs,
            flash=None, code=None, banks={}, lacks="", trained_weights=savings.trained,
            input_in_arena=bool(savings.input), frozen_layers=savings.frozen, frozen_error=variant.frozen_error,
        )  # fmt: skip
        fixed = {"state": state, "inputs": inputs, "reserve": self.reserve}
        if not self.board.constants_in_sram:
            return self._planned(part, variant, fixed)
        part = replace(part, constants=flash_weights)
        while True:  # the tables are known from a plan, and one in less room may have more of them
            planned = self._planned(part, variant, fixed | {"constants": part.constants})
            if planned.flash is None or planned.flash <= part.constants:
                return planned
            part = replace(part, constants=planned.flash)

    def _planned(self, part: TrainedPart, variant: _Variant, fixed: Mapping[str, int]) -> TrainedPart:
        """Plan the step of a part, beside arrays of fixed sizes: bytes of state, inputs, reserve and constants, by
        name."""
        state, inputs = part.state, part.inputs
        outside_arena = state + inputs + part.constants
        room = arena_room(self.board.banks, fixed.values())
        if room < 0:  # the other arrays alone do not fit
            return replace(part, ram=outside_arena, arena=0, banks={}, flash=None, code=None, lacks="SRAM")
        request = replace(self.request, budget=state + inputs + room)
        try:
            layout = planned_step(_NAME, request, *variant.arguments).layout
        except BudgetError as error:
            arena = error.smallest_budget - state - inputs
            return replace(part, ram=outside_arena + arena, arena=arena, banks={}, flash=None, code=None, lacks="SRAM")
        banks = placed(self.board.banks, {"arena": layout.arena_bytes, **fixed})
        part = replace(part, ram=layout.arena_bytes + outside_arena, arena=layout.arena_bytes, banks=banks)
        flash = layout.memory.flash_bytes + layout.constant_bytes
        if self.board.constants_in_sram:
            flash = constants_bytes(layout, INT_OF_AVR)
        compiled = flash_bytes(self.board.core, layout)  # None without the cross compiler: the code is not counted
        code = None if compiled is None else compiled - flash
        lacks = "flash" if self.board.flash is not None and (compiled or flash) > self.board.flash else ""
        return replace(part, flash=flash, code=code, lacks=lacks)

    def _step(self, paths: Collection[str], savings: _Savings) -> _Variant:
        """Return the captured passes of a step that trains parameters of these names, its rules, and where its weights
        lie."""
        rules = replace(self.rules, group_of={path: self.rules.group_of[path] for path in paths})
        stored = StorageOptions(
            trained_type=savings.trained, separate_arena=len(self.board.banks) > 1, arena_input=savings.input
        )
        if savings.frozen == "int8":
            in_int8 = self._int8_step(tuple(paths))
            if in_int8 is not None:
                return _Variant(*in_int8.int8_passes, rules, stored, str(in_int8.report))
        graph = self.captured.graph
        gradients = tuple(pair for pair in graph.gradients if graph.values[pair[0]].path in paths)
        captured = replace(self.captured, graph=replace(graph, gradients=gradients))
        return _Variant(captured, self.infer, rules, stored)

    def _int8_step(self, paths: tuple[str, ...]) -> Int8Step | None:
        """Return the step that trains parameters of these names, with the layers before them in eight bits."""
        if paths not in self.int8_steps:
            with self._training_only(paths):  # what is frozen is seen while the step is captured
                passes = captured_passes(self.request)
            self.int8_steps[paths] = int8_step(self.request, passes, self.samples)
        return self.int8_steps[paths]

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
