"""Fit inference in a byte budget: the model runs on overlapping parts of its input, to the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

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


_MAX_ESTIMATE = 1.2
"""Largest estimated peak of parts that are predicted exactly, as a multiple of the budget."""


class _Option(NamedTuple):
    """A way to cut the input into parts."""

    read: int
    """Elements of space that all parts together read."""
    estimate: int
    """Estimated peak in bytes."""
    counts: tuple[int, ...]
    """Number of parts along each dimension of space."""


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
        windows = zip(*(part.input_windows for part in self.parts), strict=True)
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
    """Make inference of a model fit a budget: where it does not fit as it is, it runs part by part.

    Args:
        model: a module in evaluation mode, or a callable that returns it.
        inputs, kwargs: of the call: a single tensor of samples, channels and space, or its description.
        budget: bytes, a size, or relative to the peak without parts.

    Raises:
        UsageError: a model in training mode, or other arguments than a single input of samples, channels and space.
        BudgetError: it does not fit, in whatever parts.
        VerificationError: two crops do not compute the same values.
    """
    model, input = _checked(model, inputs, kwargs)
    shape = tuple(input.shape)
    before = _peak(model, shape, input.dtype)
    limit = _budget(budget, before)
    resident = storage_bytes((*model.parameters(), *model.buffers(), input))
    if before <= limit:
        return FittedInference(
            model, changed=False, budget=limit, before=before, predicted=before,
            measured=resident + _growth(lambda: model(input)),
        )  # fmt: skip
    try:
        crops = Crops(model, shape, input.dtype)
        parts, predicted = _parts(model, crops, limit, before)
    except NotTileable as reason:
        raise _no_budget(limit, before, f"Give {format_bytes(before)}; it does not run in parts: {reason}") from None
    original = model.forward
    result: Tensor | None = None

    def run() -> None:
        nonlocal result
        result = crops.run(input, parts, original)

    measured = resident + _growth(run)
    assert result is not None, "run() was called"
    if measured > limit:
        raise _no_budget(limit, measured, f"Give {format_bytes(measured)} ({measured} bytes)")
    with torch.no_grad():
        difference = _difference(crops, parts, input, result, original)
    if difference > ROUNDING:
        raise VerificationError(
            f"A part of the input gives other values than its neighbour: {difference:.2g} of the largest result",
            expected="the same but for rounding",
            do="Run it as it is; the model is as before",
        )
    overlap = sum(prod(high - low for low, high in part.input_windows) for part in parts) / prod(shape[2:])
    undo = _install(model, crops, parts, original)
    return FittedInference(
        model, changed=True, budget=limit, before=before, predicted=predicted, measured=measured, parts=tuple(parts),
        overlap=overlap, difference=difference, _undo=undo,
    )  # fmt: skip


def _checked(model: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[nn.Module, Tensor]:
    """Return the module and its only input as a tensor. Raises UsageError or InputError if either is not supported."""
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
    """Return the bytes of a budget, which can be relative to the peak ``before``. Raises UsageError for a card."""
    parsed = read_any_budget(budget)
    if isinstance(parsed, Device):
        raise UsageError("a card's name as the budget of inference", expected="bytes", do="Give bytes")
    return parsed.of(before) if isinstance(parsed, Relative) else parsed


def _no_budget(budget: int, least: int, do: str) -> BudgetError:
    """Return the error for a budget that is too small. ``least``: the smallest bytes that inference is known to fit."""
    found, expected = f"The budget is {format_bytes(budget)}", f"at least {format_bytes(least)}"
    return BudgetError(found, expected=expected, do=do, smallest_budget=least)


def _peak(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the predicted peak of inference as it is, in bytes."""
    options = StepOptions((Spec(shape, dtype),), train=False).checked()
    return simulate(record(build_of(model, options), steps=1)).peak_allocated


def _parts(model: nn.Module, crops: Crops, budget: int, before: int) -> tuple[list[Crop], int]:
    """Return the parts that read the least of the input, of those that fit, and their predicted peak in bytes.

    Raises BudgetError if none fit. ``before``: the predicted peak without parts, in bytes.
    """
    weights = storage_bytes((*model.parameters(), *model.buffers()))
    input_bytes = prod(crops.input_shape) * crops.dtype.itemsize
    result_bytes = prod(crops.result_shape) * crops.result_dtype.itemsize
    bytes_per_element = (before - weights) / prod(crops.input_shape)
    lengths_along = list[dict[int, list[int]]]()
    """For each dimension of space, the lengths of the input that the parts read, by number of parts."""
    for dim, (size, stride) in enumerate(zip(crops.result_shape[2:], crops.strides, strict=True)):
        lengths_by_count = dict[int, list[int]]()
        for count in COUNTS:
            if count <= size // stride:
                windows = [crops.windows_along(dim, window)[0] for window in crops.windows_of_parts(dim, count)]
                lengths_by_count[count] = [high - low for low, high in windows]
        lengths_along.append(lengths_by_count)
    options = list[_Option]()
    for counts in product(*lengths_along):
        lengths = [lengths_along[dim][count] for dim, count in enumerate(counts)]
        largest = prod(crops.input_shape[:2]) * prod(map(max, lengths))
        estimate = weights + input_bytes + result_bytes + int(bytes_per_element * largest)
        options.append(_Option(prod(map(sum, lengths)), estimate, counts))
    smallest = min(options, key=lambda option: option.estimate)
    least = before
    for option in (*sorted(options), smallest):
        if option.estimate > _MAX_ESTIMATE * budget and option.counts != smallest.counts:
            continue
        parts = crops.grid(option.counts)
        predicted = _peak_in_parts(model, crops, parts)
        least = min(least, predicted)
        if predicted <= budget:
            return parts, predicted
    raise _no_budget(budget, least, f"Give {format_bytes(least)} ({least} bytes): input and result alone take "
                     f"{format_bytes(input_bytes + result_bytes)}")  # fmt: skip


def _peak_in_parts(model: nn.Module, crops: Crops, parts: list[Crop]) -> int:
    """Return the predicted peak of inference in parts, in bytes. Of parts of the same shape, a single one is run."""
    distinct = list({crops.shape(part): part for part in parts}.values())

    def build() -> Callable[[], object]:
        """Return inference in parts, with a copy of the model and a new input."""
        copy, input = copy_module(model), torch.empty(crops.input_shape, dtype=crops.dtype)

        def step() -> None:
            with torch.no_grad():
                crops.run(input, distinct, copy.forward)

        return step

    return simulate(record(build, steps=1)).peak_allocated


def _growth(run: Callable[[], object]) -> int:
    """Return the peak bytes that a function allocates without grad."""
    with torch.no_grad():
        return measure_step(run).growth_peak


def _difference(
    crops: Crops, parts: list[Crop], input: Tensor, result: Tensor, model: Callable[[Tensor], Tensor]
) -> float:
    """Return the largest difference between the result and that of another crop, as a share of the largest value. The
    crop lies across the first border between parts, along each dimension of space (in the middle if there is none).
    ``model`` runs the model whole."""
    windows = list[tuple[int, int]]()
    for size, stride, (_, end) in zip(crops.result_shape[2:], crops.strides, parts[0].result_windows, strict=True):
        border = end if end < size else size // 2
        windows.append((max(0, border - stride), min(size, border + stride)))
    crop = crops.crop(tuple(windows))
    computed = crops.part(input, crop, model)
    expected = result[(..., *(slice(low, high) for low, high in crop.result_windows))]
    return float((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _install(model: nn.Module, crops: Crops, parts: list[Crop], original: Callable[..., Any]) -> Callable[[], None]:
    """Make the model's calls run part by part, and return the function that undoes it. ``original``: its forward()."""
    had_own_forward = "forward" in vars(model)  # else it is the class's

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run inference of an input of the planned shape part by part, and all other calls as they are."""
        input = args[0] if len(args) == 1 and not kwargs else None
        is_inference = not torch.is_grad_enabled() and not any(module.training for module in model.modules())
        if isinstance(input, Tensor) and is_inference and crops.is_for(input):
            return crops.run(input, parts, original)
        return original(*args, **kwargs)

    model.forward = forward

    def undo() -> None:
        """Restore the model's forward(), unless it was replaced since."""
        if vars(model).get("forward") is forward:
            del model.forward
            if had_own_forward:
                model.forward = original

    return undo
