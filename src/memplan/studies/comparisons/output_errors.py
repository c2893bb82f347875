"""How far the results of two steps are apart where both really run: each with its own weights, on the same inputs and
random numbers. A function that makes a model is called from the same random state for both."""

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
from memplan.studies.comparisons.comparison import Apart
from memplan.studies.comparisons.pruned_weights import ORIGINAL
from memplan.trace.recording.boundaries import Step
from memplan.trace.recording.place import format_frame, frame_of_error
from memplan.trace.recording.session import undisturbed
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions, build_of, copy_module
from memplan.verification.proof.differences import named_outputs

_SEED = 0
_RUNS = 5
_LONG = 2.0
"""Seconds of a step from which on it runs once."""


def made(what: Any) -> nn.Module | None:
    """Return the model of a step with its weights; None where a build brings a step of its own. A module is copied.

    Raises:
        StepError: the callable that makes it raised.
    """
    with undisturbed(real=True):
        torch.manual_seed(_SEED)
        try:
            found = copy_module(what) if isinstance(what, nn.Module) else what()
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
    return found if isinstance(found, nn.Module) else None


def seconds_of(step: Step) -> float:
    """Return the median of some runs after the first, or the first alone where it takes long."""
    with undisturbed(real=True):
        first = _timed(step)
        return first if first > _LONG else median(_timed(step) for _ in range(_RUNS))


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def why_not_comparable(one: nn.Module | None, other: nn.Module | None, a: StepOptions, b: StepOptions) -> str | None:
    """Return why the results of two steps cannot be held against each other; None where they can."""
    if one is None or other is None:
        return "a build makes its own model and data, so results are not held against each other"
    mine, its = ({name: value.shape for name, value in weights_of(model).items()} for model in (one, other))
    if mine != its:
        return "the two are other networks, so their results are not held against each other"
    if not _same_inputs(a, b):
        return "the two have other inputs, so their results are not held against each other"
    return None


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name; a masked one by the name that it has without its mask."""
    return {name.removesuffix(ORIGINAL): value for name, value in model.named_parameters()}


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the parameters and buffers of two models are equal, bit for bit."""
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(value, its[name].to(value)) for name, value in mine.items())


def _same_inputs(a: StepOptions, b: StepOptions) -> bool:
    """Return whether inputs are the same; of described ones, and of tensors of another dtype, their sizes."""
    one, other = (_torch.tree_leaves((o.inputs, dict(o.kwargs), o.targets)) for o in (a, b))
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Spec) and isinstance(other, Spec):
        return replace(one, dtype=other.dtype) == other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and (one.dtype != other.dtype or torch.equal(one, other))
    return one is other or bool(one == other)


def apart(one: nn.Module, other: nn.Module, a: StepOptions, b: StepOptions) -> tuple[Apart, ...]:
    """Compare outputs and, where both train, gradients of one step of each. Both models are changed by their step."""
    mine, its = _run(one, a), _run(other, b)
    return tuple(
        found
        for kind in ("outputs", "gradients")
        if kind in mine and kind in its and (found := _apart(kind, mine[kind], its[kind])) is not None
    )


def _run(model: nn.Module, options: StepOptions) -> dict[str, dict[str, torch.Tensor]]:
    seen: list[Any] = []
    step = build_of(lambda: model, options)()
    handle = model.register_forward_hook(lambda module, args, output: seen.append(named_outputs(output)))
    with undisturbed(real=True):
        torch.manual_seed(_SEED)
        step()
    handle.remove()
    outputs = {name: value.detach().clone() for name, value in seen[0].items()}
    gradients = {name: value.grad for name, value in weights_of(model).items() if value.grad is not None}
    return {"outputs": outputs} | ({"gradients": gradients} if gradients else {})


def _apart(kind: str, mine: Mapping[str, torch.Tensor], its: Mapping[str, torch.Tensor]) -> Apart | None:
    names = [name for name in mine if name in its and mine[name].shape == its[name].shape]
    names = [name for name in names if mine[name].is_floating_point() and mine[name].numel()]
    if not names:
        return None
    squared = norm = largest = 0.0
    for name in names:
        one, other = mine[name].double(), its[name].double()
        difference = other - one
        squared += float(difference.square().sum())
        norm += float(one.square().sum())
        largest = max(largest, float(difference.abs().nan_to_num(nan=math.inf).max()))
    relative = (squared / norm) ** 0.5 if norm else 0.0 if not squared else math.inf
    return Apart(kind, len(names), _finite(relative), _finite(largest))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
