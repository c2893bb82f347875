"""Inference with quantized weights and activations, tried on the real model by torchao's quantizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, MemplanError, TargetError
from memplan.simulation.simulate import simulate
from memplan.studies.comparisons import output_errors
from memplan.studies.comparisons.comparison import Apart, Side
from memplan.studies.comparisons.sides import of_trace
from memplan.studies.quantization.quantized import Quantized
from memplan.studies.quantization.schemes import apply, layers_of, scheme_of
from memplan.studies.sweeps.points import of_steps
from memplan.trace.measure import measure
from memplan.trace.recording.boundaries import Step
from memplan.trace.recording.session import public
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions, build_of, copy_module, forward_of


@public
def quantize(
    what: Any,
    *inputs: Any,
    kwargs: Mapping[str, Any] = {},  # read only
    weights: str = "int8",
    activations: str | None = None,
    autocast: torch.dtype | str | None = None,
    dtype: torch.dtype | None = None,
) -> Quantized:
    """Try what inference takes with quantized weights: a copy of the model is quantized by torchao, and both run here.

    Bytes are the CPU allocator's own events, as of `memplan.measure`.

    Args:
        what: a module, or a callable that makes one (it is really made). It is not changed.
        inputs, kwargs, autocast, dtype: as for `memplan.explain`. Described inputs are random numbers.
        weights: ``"int8"`` (a scale for each output), or ``"int4"`` (a scale and a zero for each group of up to 128
            inputs).
        activations: ``"int8"``: the input of each quantized layer, too, while the step runs; None: not.

    Returns:
        A Quantized; printing it gives a paragraph.

    Raises:
        TargetError: ``what`` makes no module.
        InputError: no such scheme, or a model in which it quantizes nothing.
        UsageError: torchao is not installed: pip install 'memplan[quantize]'.
        StepError: the model does not run, before or after it is quantized.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        >>> print(memplan.quantize(model, "8x1024", weights="int8"))
        Weights 8.0 MiB -> 2.0 MiB: 6.0 MiB less, -75 % (2 of 2 layers with weights quantized).
        Peak of inference 8.1 MiB -> 6.1 MiB: 2.0 MiB less, -25 %.
        ...
    """
    options = StepOptions(inputs, kwargs, autocast=autocast, train=False, dtype=dtype).checked()
    return quantize_step(what, options, weights, activations)


def quantize_step(what: Any, options: StepOptions, weights: str | None, activations: str | None) -> Quantized:
    """Quantize and run a step, as `quantize` does."""
    scheme = scheme_of(weights, activations)
    model = _made(what, options)
    after = copy_module(model) if scheme.config is not None else None
    if after is not None:
        apply(after, scheme)
    layers = layers_of(model, scheme, after)
    if all(layer.why is not None for layer in layers):
        reasons = "; ".join(dict.fromkeys(f"{layer.name}: {layer.why}" for layer in layers[:3]))
        raise InputError(
            f"nothing in {type(model).__name__} can be quantized by {scheme.title}"
            + (f" ({reasons})" if reasons else ""),
            expected="a model with layers that torchao quantizes: nn.Linear",
            do="Look at a lower precision instead: --precision bf16-true",
        )
    options = replace(options, dtype=None)  # it has it
    before = _run(model, options, "as it is")[0]
    with_grad = _run(model, options, "with grad", grad=True)[0]
    notes = () if scheme.config is not None else (scheme.why_not,)
    if after is None:
        return Quantized(scheme.title, before, None, with_grad, layers, None, None, notes)
    ran, quantizing = _run(model, options, scheme.title, lambda made: apply(made, scheme))
    error = _error(model, after, options)
    return Quantized(scheme.title, before, ran, with_grad, layers, error, quantizing)


def _made(what: Any, options: StepOptions) -> nn.Module:
    """Return the model, in evaluation mode and of the dtype that it runs in; the user's own is not changed."""
    if not isinstance(what, nn.Module) and not callable(what):
        raise TargetError(
            f"{type(what).__name__} {what!r:.60}",
            expected="a module, or a callable that makes one",
            do="Pass one of these",
        )
    model = output_errors.made(what)
    if model is None:
        raise TargetError(
            "a build that returns a step, to quantize",
            expected="a module, or a callable that makes one: a step brings its own",
            do="Name a callable that returns the module",
        )
    return (model if options.dtype is None else model.to(options.dtype)).eval()


def _run(
    model: nn.Module,
    options: StepOptions,
    title: str,
    change: Callable[[nn.Module], None] | None = None,
    *,
    grad: bool = False,
) -> tuple[Side, int]:
    """Run the steps of a copy; return the side, and the most bytes that were allocated while it was made."""

    def build() -> Step:
        made = copy_module(model)
        if change is not None:
            change(made)
        if grad:
            return forward_of(made, options)
        return build_of(lambda: made, options)()

    try:
        trace = measure(build, device=HOST, steps=1)  # without an optimizer one is like the next
        seconds = output_errors.seconds_of(build())
    except MemplanError as error:
        raise error.about(title) from error.__cause__
    side = of_trace(of_steps(trace), title, train=False)
    made = simulate(trace).build.peak_allocated
    return replace(side, seconds=seconds, seconds_by="measured on this CPU"), made


def _error(before: nn.Module, after: nn.Module, options: StepOptions) -> Apart | None:
    found = output_errors.apart(before, after, options, options)
    return found[0] if found else None
