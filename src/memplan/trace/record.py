"""Predict: run the step on fake tensors and write down what it would allocate."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import torch

from memplan import _torch
from memplan.trace.causes import finish
from memplan.trace.model import Trace
from memplan.trace.observer import Observer, Semantics
from memplan.trace.place import Place
from memplan.trace.semantics import cpu, results
from memplan.trace.session import Build, check_steps, choose_device, located, run_build, undisturbed
from memplan.trace.standins import Standins


def record(build: Build, *, device: str | None = None, steps: int = 2) -> Trace:
    """Run a step on fake tensors and return what it would allocate. Nothing is allocated, no GPU is needed.

    Args:
        build: makes whatever the step needs (model, data, optimizer) and returns ``step``, a callable without
            arguments that runs one step. The same ``build`` works for `measure`.
        device: what to predict for: ``"cpu"``, or None for the device of this machine.
        steps: how often the step runs. Two by default, since an optimizer makes its state in the first.

    Raises:
        StepError: ``build`` or the step raised, or ``build`` did not return a step; with layer and file:line.
        DataDependentError: the shape of a tensor depends on values.
        DeviceError: a device that memplan has no model of.

    Example:
        >>> def build():
        ...     model = torch.nn.Linear(512, 512)
        ...     data = torch.randn(64, 512)
        ...     return lambda: model(data).sum().backward()
        >>> print(memplan.record(build))
    """
    check_steps(steps)
    target, notes = choose_device(device)
    place = Place()
    observer = Observer(place, real=False, semantics=Semantics(cpu.transient_bytes, results.RESULTS, results.INSTEAD))
    mode = _torch.FakeMode(observer.dispatch)
    standins = Standins(observer, mode)
    observer.read_scalar, observer.read_equal = standins.read, standins.equal
    with undisturbed(), ExitStack() as stack:
        stack.enter_context(standins.installed())
        stack.enter_context(mode.recording())
        observer.calibrate()
        stack.enter_context(place.following())
        step = run_build(build, observer)
        place.building = False
        observer.mark_modules()
        bounds = [_boundary(observer)]
        for number in range(steps):
            place.step = number
            with located(observer, f"step {number + 1}"):
                step()
            observer.end_step()
            bounds.append(_boundary(observer))
        observer.ledger.close()
        parts = finish(observer, bounds[0])
        del step
    return Trace(
        "recorded", target, torch.__version__, tuple(parts.ops), tuple(parts.storages), tuple(parts.layers),
        tuple(bounds[:-1]), bounds[-1], standins.assumptions(), notes,
    )  # fmt: skip


def _boundary(observer: Observer) -> int:
    gc.collect()
    return observer.ledger.clock
