"""Fit inference in a byte budget: the model runs on overlapping parts of its input, to the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from memplan._bytes import format_bytes
from memplan._display import Printed
from memplan.devices import Device
from memplan.errors import BudgetError, InputError, UsageError, VerificationError
from memplan.planning.relative_budget import Relative, read_any_budget
from memplan.planning.tiles.crops import Crop, Crops
from memplan.planning.tiles.program import NotTileable
from memplan.simulation.simulate import simulate
from memplan.trace.record import record
from memplan.trace.spec import Spec, as_spec
from memplan.trace.step import StepOptions, build_of, copy_module
from memplan.verification.fitting.outcome import InferenceFigures, InferenceOutcome
from memplan.verification.measurement.peak_and_time import measure_step, storage_bytes

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of parts to try along each dimension of space."""
ROUNDING = 1e-3
"""Largest difference, as a share of the largest result, of a value that two crops compute: kernels of other sizes add
in another order. Values that miss a border differ by more."""


@dataclass
class FittedInference(Printed):
    """A model whose inference runs within a budget."""

    model: nn.Module
    """The user's model: in evaluation mode and without grad, calls with an input of this shape run part by part."""
    changed: bool
    """False where it fits as it is."""
    budget: int
    before: int
    """Predicted peak without parts, in bytes."""
    predicted: int
    """Predicted peak, in bytes."""
    measured: int
    """Measured peak of one call, in bytes."""
    parts: tuple[Crop, ...] = ()
    """What is computed at once; empty if it fits as it is."""
    overlap: float = 1.0
    """Elements of the input that are read, per element of the input."""
    difference: float = 0.0
    """Largest difference of values that two overlapping crops compute, as a share of the largest result."""
    _undo: Callable[[], None] = field(default=lambda: None, repr=False)

    def undo(self) -> None:
        """Make the model run as before."""
        self._undo()
        self.changed = False

    def outcome(self, title: str) -> InferenceOutcome:
        """Return the figures as data, under a title."""
        figures = InferenceFigures(
            self.budget, self.before, self.predicted, self.measured, len(self.parts), self.largest_part, self.overlap,
            self.difference,
        )  # fmt: skip
        return InferenceOutcome(title, figures)

    @property
    def largest_part(self) -> tuple[int, ...]:
        """Elements along each dimension of space that a part reads at most; empty if it fits as it is."""
        windows = zip(*(part.input for part in self.parts), strict=True)
        return tuple(max(high - low for low, high in along) for along in windows)

    def __str__(self) -> str:
        peaks = f"peak {format_bytes(self.measured)} measured, {format_bytes(self.predicted)} predicted"
        if not self.parts:
            return f"inference fits in {format_bytes(self.budget)} as it is: {peaks}"
        sizes = " x ".join(map(str, self.largest_part))
        return (
            f"inference in {len(self.parts)} parts of at most {sizes}, which read {self.overlap:.2f} times the input: "
            f"{peaks}, {format_bytes(self.budget)} budget, {format_bytes(self.before)} as it is"
        )


def fit_inference(model: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], budget: Any) -> FittedInference:
    """Make inference fit; see `fit` with ``train=False``.

    Raises:
        UsageError: a model in training mode, or other arguments than a single input of samples, channels and space.
        BudgetError: it does not fit, in whatever parts.
        VerificationError: two crops do not compute the same values.
    """
    model, input = _checked(model, inputs, kwargs)
    shape = tuple(input.shape)
    before = _peak(model, shape, input.dtype)
    bytes = _budget(budget, before)
    if before <= bytes:
        measured = _resident(model, input) + _growth(lambda: model(input))
        return FittedInference(model, False, bytes, before, before, measured)
    try:
        crops = Crops(model, shape, input.dtype)
        parts, predicted = _parts(model, crops, bytes, before)
    except NotTileable as reason:
        raise _no_budget(bytes, before, f"Give {format_bytes(before)}; it does not run in parts: {reason}") from None
    original = model.forward
    result: Tensor | None = None

    def run() -> None:
        nonlocal result
        result = crops.run(input, parts, original)

    measured = _resident(model, input) + _growth(run)
    assert result is not None, "run() was called"
    if measured > bytes:
        do = f"Give {format_bytes(measured)} ({measured} bytes)"
        raise _no_budget(bytes, measured, do)
    with torch.no_grad():
        difference = _difference(crops, parts, input, result, original)
    if difference > ROUNDING:
        raise VerificationError(
            f"A part of the input gives other values than its neighbour: {difference:.2g} of the largest result",
            expected="the same but for rounding",
            do="Run it as it is; the model is as before",
        )
    read = sum(prod(high - low for low, high in part.input) for part in parts) / prod(shape[2:])
    undo = _install(model, crops, parts, original)
    return FittedInference(model, True, bytes, before, predicted, measured, tuple(parts), read, difference, undo)


def _checked(model: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
    model = model if isinstance(model, nn.Module) else model()
    if any(module.training for module in model.modules()):
        raise UsageError("The model is in training mode", expected="evaluation mode", do="Call model.eval() first")
    if len(inputs) != 1 or kwargs:
        raise InputError("inference in parts with several inputs", expected="a single tensor", do="Wrap the model")
    described = as_spec(inputs[0])
    input = described.make() if isinstance(described, Spec) else described
    if not isinstance(input, Tensor) or input.dim() < 3 or input.device.type != "cpu":
        raise InputError(f"an input of {type(input).__name__}", expected="samples, channels and space, on the CPU")
    return model, input


def _budget(budget: Any, before: int) -> int:
    read = read_any_budget(budget)
    if isinstance(read, Device):
        raise UsageError("a card's name as the budget of inference", expected="bytes", do="Give bytes")
    return read.of(before) if isinstance(read, Relative) else read


def _no_budget(budget: int, least: int, do: str) -> BudgetError:
    found, expected = f"The budget is {format_bytes(budget)}", f"at least {format_bytes(least)}"
    return BudgetError(found, expected=expected, do=do, smallest_budget=least)


def _peak(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the predicted peak of inference as it is, in bytes."""
    options = StepOptions((Spec(shape, dtype),), train=False).checked()
    return simulate(record(build_of(model, options), steps=1)).peak_allocated


def _parts(model: nn.Module, crops: Crops, budget: int, before: int) -> tuple[list[Crop], int]:
    """Return the parts that read the least of the input twice, of those that fit, and their predicted peak."""
    weights = storage_bytes((*model.parameters(), *model.buffers()))
    whole = prod(crops.input_shape) * crops.dtype.itemsize
    result = prod(crops.result_shape) * crops.result_dtype.itemsize
    per_element, stripes = (before - weights) / prod(crops.input_shape), list[dict[int, list[int]]]()
    for at, (size, stride) in enumerate(zip(crops.result_shape[2:], crops.strides, strict=True)):
        windows = {count: crops.cuts(at, count) for count in COUNTS if count <= size // stride}
        read = {n: [crops.along(at, window)[0] for window in along] for n, along in windows.items()}
        stripes.append({count: [high - low for low, high in along] for count, along in read.items()})
    sized = list[tuple[int, int, tuple[int, ...]]]()
    for counts in product(*stripes):
        lengths = [stripes[at][count] for at, count in enumerate(counts)]
        largest = prod(crops.input_shape[:2]) * prod(map(max, lengths))
        sized.append((prod(map(sum, lengths)), weights + whole + result + int(per_element * largest), counts))
    smallest = min(sized, key=lambda option: option[1])
    least = before
    for _, expected, counts in (*sorted(sized), smallest):
        if expected > 1.2 * budget and counts != smallest[2]:
            continue
        parts = crops.grid(counts)
        predicted = _peak_in_parts(model, crops, parts)
        least = min(least, predicted)
        if predicted <= budget:
            return parts, predicted
    raise _no_budget(budget, least, f"Give {format_bytes(least)} ({least} bytes): input and result alone take "
                     f"{format_bytes(whole + result)}")  # fmt: skip


def _peak_in_parts(model: nn.Module, crops: Crops, parts: list[Crop]) -> int:
    """Return the predicted peak of inference in parts, in bytes: of one part of each shape."""
    kinds = list({crops.shape(part): part for part in parts}.values())

    def build() -> Callable[[], object]:
        copy, input = copy_module(model), torch.empty(crops.input_shape, dtype=crops.dtype)

        def step() -> None:
            with torch.no_grad():
                crops.run(input, kinds, copy.forward)

        return step

    return simulate(record(build, steps=1)).peak_allocated


def _growth(run: Callable[[], object]) -> int:
    with torch.no_grad():
        return measure_step(run).growth_peak


def _resident(model: nn.Module, input: Tensor) -> int:
    return storage_bytes((*model.parameters(), *model.buffers(), input))


def _difference(
    crops: Crops, parts: list[Crop], input: Tensor, result: Tensor, model: Callable[[Tensor], Tensor]
) -> float:
    """Return how far the result is from that of a crop that lies across the first border between parts, as a share of
    the largest value."""
    seams = list[tuple[int, int]]()
    for size, stride, own in zip(crops.result_shape[2:], crops.strides, parts[0].result, strict=True):
        middle = own[1] if own[1] < size else size // 2
        seams.append((max(0, middle - stride), min(size, middle + stride)))
    crop = crops.crop(tuple(seams))
    computed = crops.part(input, crop, model)
    expected = result[(..., *(slice(low, high) for low, high in crop.result))]
    return float((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _install(model: nn.Module, crops: Crops, parts: list[Crop], original: Callable[..., Any]) -> Callable[[], None]:
    """Run the model's calls part by part, and return what undoes that."""
    had = "forward" in vars(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        input = args[0] if len(args) == 1 and not kwargs else None
        if (
            not isinstance(input, Tensor)
            or torch.is_grad_enabled()
            or not crops.is_for(input)
            or any(module.training for module in model.modules())
        ):
            return original(*args, **kwargs)
        return crops.run(input, parts, original)

    model.forward = forward

    def undo() -> None:
        if vars(model).get("forward") is forward:
            del model.forward
            if had:
                model.forward = original

    return undo
