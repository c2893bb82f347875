"""Differences between the outputs and gradients of two models that really run, from the same random state."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import MemplanError, StepError
from memplan.studies.comparisons.comparison import ResultDifference
from memplan.studies.comparisons.pruned_weights import ORIGINAL
from memplan.trace.recording.boundaries import Step
from memplan.trace.recording.place import format_frame, frame_of_error
from memplan.trace.recording.session import undisturbed
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions, build_of, copy_module
from memplan.verification.proof.differences import named_outputs

_SEED = 0
_RESULTS = ("outputs", "gradients")
_RUNS = 5
_LONG = 2.0
"""Seconds: a step that takes longer than this runs once."""


def make_model(what: Any) -> nn.Module | None:
    """Return a copy of a module, or the module that a callable makes after `torch.manual_seed`; None where the callable
    is a ``build`` that returns a step instead. Raises StepError if the callable raised."""
    with undisturbed(real=True):
        torch.manual_seed(_SEED)
        try:
            model = copy_module(what) if isinstance(what, nn.Module) else what()
        except MemplanError:
            raise
        except Exception as error:  # the user's code can raise anything; the original stays as __cause__
            text = str(error).strip().split("\n")[0] or "no message"
            raise StepError(
                f"making the model raised {type(error).__name__}: {text.rstrip('.')[:300]}",
                expected="a callable that makes a module",
                do="Correct it; it should raise the same outside of memplan",
                where=format_frame(frame_of_error(error)),
            ) from error
    return model if isinstance(model, nn.Module) else None


def seconds_of(step: Step) -> float:
    """Return the seconds of a step: the median of five runs after a first, or that first run if it takes long."""
    with undisturbed(real=True):
        first = _run_seconds(step)
        return first if first > _LONG else median(_run_seconds(step) for _ in range(_RUNS))


def _run_seconds(step: Step) -> float:
    """Run a step, and return the seconds that it took."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def why_not_comparable(
    model_a: nn.Module | None, model_b: nn.Module | None, a: StepOptions, b: StepOptions
) -> str | None:
    """Return why the results of two models on the inputs of ``a`` and ``b`` cannot be compared; None if they can.

    ``model_a``, ``model_b``: None for a ``build``, which makes its own model.
    """
    if model_a is None or model_b is None:
        return "a build makes its own model and data, so results are not held against each other"
    shapes_a, shapes_b = ({name: p.shape for name, p in parameters_of(model).items()} for model in (model_a, model_b))
    if shapes_a != shapes_b:
        return "the two are other networks, so their results are not held against each other"
    if not _same_inputs(a, b):
        return "the two have other inputs, so their results are not held against each other"
    return None


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name; those pruned by a mask without the ``_orig`` that pruning appends."""
    return {name.removesuffix(ORIGINAL): parameter for name, parameter in model.named_parameters()}


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Return whether the parameters and buffers of two models are equal, once converted to the dtype of ``a``."""
    state_a, state_b = a.state_dict(), b.state_dict()
    return state_a.keys() == state_b.keys() and all(
        torch.equal(tensor, state_b[name].to(tensor)) for name, tensor in state_a.items()
    )


def _same_inputs(a: StepOptions, b: StepOptions) -> bool:
    """Return whether inputs and targets are equal; specs, and tensors of different dtypes, need only the same shape."""
    leaves_a, leaves_b = (_torch.tree_leaves((o.inputs, dict(o.kwargs), o.targets)) for o in (a, b))
    return len(leaves_a) == len(leaves_b) and all(map(_same_input, leaves_a, leaves_b))


def _same_input(a: Any, b: Any) -> bool:
    """Return whether two inputs are the same except for the dtype."""
    if isinstance(a, Spec) and isinstance(b, Spec):
        return replace(a, dtype=b.dtype) == b
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and (a.dtype != b.dtype or torch.equal(a, b))
    return a is b or bool(a == b)


def result_differences(
    model_a: nn.Module, model_b: nn.Module, a: StepOptions, b: StepOptions
) -> tuple[ResultDifference, ...]:
    """Run one step of each model and compare outputs and, where both train, gradients. The steps change the models."""
    results_a, results_b = _results(model_a, a), _results(model_b, b)
    differences = [_difference(kind, results_a.get(kind, {}), results_b.get(kind, {})) for kind in _RESULTS]
    return tuple(difference for difference in differences if difference is not None)


def _results(model: nn.Module, options: StepOptions) -> dict[str, dict[str, torch.Tensor]]:
    """Run one step; return tensors by name of its ``outputs`` and, if there are any, ``gradients``."""
    outputs_of_calls: list[Any] = []
    step = build_of(lambda: model, options)()
    handle = model.register_forward_hook(lambda module, args, output: outputs_of_calls.append(named_outputs(output)))
    with undisturbed(real=True):
        torch.manual_seed(_SEED)
        step()
    handle.remove()
    outputs = {name: tensor.detach().clone() for name, tensor in outputs_of_calls[0].items()}
    gradients = {name: p.grad for name, p in parameters_of(model).items() if p.grad is not None}
    return {"outputs": outputs} | ({"gradients": gradients} if gradients else {})


def _difference(
    kind: str, tensors_a: Mapping[str, torch.Tensor], tensors_b: Mapping[str, torch.Tensor]
) -> ResultDifference | None:
    """Return the difference of floating-point tensors of the same name and shape; None if there are none."""
    names = [name for name in tensors_a if name in tensors_b and tensors_a[name].shape == tensors_b[name].shape]
    names = [name for name in names if tensors_a[name].is_floating_point() and tensors_a[name].numel()]
    if not names:
        return None
    squared = norm = largest = 0.0
    for name in names:
        reference = tensors_a[name].double()
        difference = tensors_b[name].double() - reference
        squared += float(difference.square().sum())
        norm += float(reference.square().sum())
        largest = max(largest, float(difference.abs().nan_to_num(nan=math.inf).max()))
    zero_norm = math.inf if squared else 0.0
    relative = (squared / norm) ** 0.5 if norm else zero_norm
    finite = [value if math.isfinite(value) else None for value in (relative, largest)]
    return ResultDifference(kind, len(names), *finite)
