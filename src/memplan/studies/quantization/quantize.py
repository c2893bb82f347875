"""Measured memory and errors of inference with weights quantized by torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan.errors import InputError, MemplanError, TargetError
from memplan.simulation.simulate import simulate
from memplan.studies.comparisons import output_errors
from memplan.studies.comparisons.comparison import Side
from memplan.studies.comparisons.sides import of_trace
from memplan.studies.quantization.quantized import Quantized
from memplan.studies.quantization.schemes import layers_of, quantize_weights, scheme_of
from memplan.studies.sweeps.points import without_build_temporaries
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
    """Measure inference before and after quantizing: torchao quantizes a copy of the model, and both run on this CPU.

    Bytes come from the CPU allocator's events, as in `memplan.measure`.

    Args:
        what: a module, which is not changed, or a callable that makes one, which is called.
        inputs, kwargs, autocast, dtype: as for `memplan.explain`. Described inputs are random numbers.
        weights: ``"int8"`` (a scale for each output), or ``"int4"`` (a scale and a zero for each group of up to 128
            inputs).
        activations: ``"int8"`` to also quantize the input of each quantized layer while it runs; None not to.

    Returns:
        A Quantized; printing it gives a paragraph.

    Raises:
        TargetError: ``what`` makes no module.
        InputError: the scheme does not exist, or quantizes no layer of the model.
        UsageError: torchao is not installed: pip install 'memplan[quantize]'.
        StepError: the model does not run, before or after it is quantized.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        >>> print(memplan.quantize(model, "8x1024", weights="int8"))
        Quantized: inference on the CPU, by Int8WeightOnlyConfig
        Weights 8.0 MiB -> 2.0 MiB: 6.0 MiB less, -75 % (2 of 2 layers with weights quantized).
        Peak of inference 8.1 MiB -> 6.1 MiB: 2.0 MiB less, -25 %.
        ...
    """
    options = StepOptions(inputs, kwargs, autocast=autocast, train=False, dtype=dtype).checked()
    return quantize_step(what, options, weights, activations)


def quantize_step(what: Any, options: StepOptions, weights: str | None, activations: str | None) -> Quantized:
    """Quantize a model and run its inference; see `quantize`."""
    scheme = scheme_of(weights, activations)
    model = _evaluated_model(what, options)
    after = copy_module(model) if scheme.config is not None else None
    if after is not None:
        quantize_weights(after, scheme)
    layers = layers_of(model, scheme, after)
    if all(layer.why is not None for layer in layers):
        reasons = "; ".join(dict.fromkeys(f"{layer.name}: {layer.why}" for layer in layers[:3]))
        raise InputError(
            f"nothing in {type(model).__name__} can be quantized by {scheme.title}"
            + (f" ({reasons})" if reasons else ""),
            expected="a model with layers that torchao quantizes: nn.Linear",
            do="Look at a lower precision instead: --dtype bf16",
        )
    options = replace(options, dtype=None)  # the model is converted already
    before, _ = _measure_inference(model, options, "as it is")
    with_grad, _ = _measure_inference(model, options, "with grad", grad=True)
    notes = () if scheme.config is not None else (scheme.why_not,)
    if after is None:
        return Quantized(
            scheme.title, before, after=None, with_grad=with_grad, layers=layers, error=None, quantizing_peak=None,
            notes=notes,
        )  # fmt: skip
    quantized, quantizing_peak = _measure_inference(
        model, options, scheme.title, lambda copy: quantize_weights(copy, scheme)
    )
    differences = output_errors.result_differences(model, after, options, options)
    error = differences[0] if differences else None
    return Quantized(scheme.title, before, quantized, with_grad, layers, error, quantizing_peak)


def _evaluated_model(what: Any, options: StepOptions) -> nn.Module:
    """Return the module in the options' dtype and evaluation mode. Raises TargetError if there is none."""
    if not isinstance(what, nn.Module) and not callable(what):
        raise TargetError(
            f"{type(what).__name__} {what!r:.60}",
            expected="a module, or a callable that makes one",
            do="Pass one of these",
        )
    model = output_errors.make_model(what)
    if model is None:
        raise TargetError(
            "a build that returns a step, to quantize",
            expected="a module, or a callable that makes one: a step brings its own",
            do="Name a callable that returns the module",
        )
    return (model if options.dtype is None else model.to(options.dtype)).eval()


def _measure_inference(
    model: nn.Module,
    options: StepOptions,
    title: str,
    change: Callable[[nn.Module], None] | None = None,
    *,
    grad: bool = False,
) -> tuple[Side, int]:
    """Measure inference of a copy of the model.

    Args:
        change: changes the copy in place first; None: nothing.
        grad: whether to run with grad, so that tensors saved for backward stay allocated.

    Returns:
        The side, and the peak bytes of copying and changing the model.
    """

    def build() -> Step:
        """Copy and change the model, so that the build of the recording has the peak of that; return its inference."""
        copy = copy_module(model)
        if change is not None:
            change(copy)
        if grad:
            return forward_of(copy, options)
        return build_of(lambda: copy, options)()

    try:
        trace = measure(build, device=HOST, steps=1)  # without an optimizer all steps are alike
        seconds = output_errors.seconds_of(build())
    except MemplanError as error:
        raise error.about(title) from error.__cause__
    side = of_trace(without_build_temporaries(trace), title, train=False)
    build_peak = simulate(trace).build.peak_allocated
    return replace(side, seconds=seconds, seconds_by="measured on this CPU"), build_peak
