"""`memplan.export`: a model's training step as C99 for a small device, under a budget of bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplan._bytes import parse_bytes
from memplan._text import write_whole
from memplan.errors import InputError, UsageError
from memplan.exporting.c_text import c_name
from memplan.exporting.device_plan import DevicePlan, Narrow, Stored, planned_step, ram_of_updates
from memplan.exporting.exported import Exported
from memplan.exporting.flash import check_flash
from memplan.exporting.folder import prepared_folder
from memplan.exporting.optimizer_rules import update_rules
from memplan.exporting.rounding import round_frozen
from memplan.exporting.source import companion_files
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.program_text import program_text
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.source.stored_weights import weights_bytes, weights_text
from memplan.exporting.trials.cortex import run_on_core
from memplan.exporting.trials.proving import NOT_VERIFIED, Verdict, prove
from memplan.exporting.trials.reference_steps import reference
from memplan.exporting.update_search import UpdateChoice, chosen_update
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.request import Request, request
from memplan.planning.settings import PlanOptions
from memplan.trace.naming.step_parts import Loss, Optimizer, optimizer_of
from memplan.trace.recording.session import public, undisturbed
from memplan.trace.step import StepOptions, copy_module

STEPS = 20
"""Steps that are recorded, and repeated by the test."""


@dataclass(frozen=True)
class _Options:
    """What an export is beside its step; see `export`."""

    budget: Any
    name: str | None
    stored: Stored
    flash: int | None
    batches: Any
    verify: bool | None
    device: str | None
    force: bool


@public
def export(
    model: Any,
    *inputs: Any,
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    budget: Any = "256 KiB",
    folder: str | Path,
    name: str | None = None,
    search_update: Any = None,
    frozen_weights: Narrow = "float32",
    weights_file: bool = False,
    flash: Any = None,
    verify: bool | None = None,
    device: str | None = None,
    force: bool = False,
) -> Exported:
    """Write a training step as C99 that needs libm alone: forward, backward and update, in a fixed arena.

    The model is not changed. Layers in training mode update their statistics; parameters that need no gradient stay in
    flash, and the backward pass stops where nothing below needs it.

    Args:
        model: a module, or a callable that makes one; parameters in float32.
        inputs, targets, loss: as for `memplan.explain`; shapes are fixed by them.
        optimizer: a name ("sgd:lr=0.1") or a callable of the parameters: SGD, Adam or AdamW of torch.
        budget: bytes of RAM: weights that are trained, what the optimizer holds, statistics, inputs and the arena.
        folder: where the files go; made where it is missing.
        name: of files and functions; None: from the model's class.
        search_update: batches of inputs and targets, by whose gradients it is chosen what to train within the budget.
        frozen_weights: ``"int8"``: eight bits for weights that are not trained; the error is measured and said.
        weights_file: write weights to NAME.bin, which the caller of the code reads, instead of NAME_weights.h.
        flash: bytes that weights and code may take; None: no bound.
        verify: compile the files, run them under sanitizers and compare them with PyTorch; None: where a C compiler is.
        device: ``"cortex-m4"`` or ``"cortex-m7"``: compile for it, too, and run the steps on an emulated one.
        force: write into a folder with other files.

    Raises:
        BudgetError: the step does not fit; ``smallest_budget`` is the smallest that does, of flash where that is short.
        RecordingError: an operation has no kernel (layer and line are named), or the step cannot be captured.
        UsageError: an argument is wrong.
        VerificationError: what was written does not compute what PyTorch does; the files are left for a look.

    Example:
        >>> done = memplan.export(
        ...     model, "1x3x16x16", targets="1:int64<10", loss="cross_entropy", optimizer="sgd:lr=0.1",
        ...     budget="512 KiB", folder="device", name="net", verify=False,
        ... )
        >>> done.ram <= 512 << 10
        True
    """
    bound = None if flash is None else parse_bytes(flash)
    options = _Options(
        budget, name, _stored(frozen_weights, weights_file), bound, search_update, verify, device, force
    )  # fmt: skip
    return _exported(model, StepOptions(inputs, {}, targets, loss, optimizer, None), Path(folder), options)


def _exported(model: Any, step: StepOptions, folder: Path, options: _Options) -> Exported:
    if step.optimizer is None:
        raise UsageError(
            "No optimizer",
            expected="SGD, Adam or AdamW: the step updates weights",
            do="Give optimizer='sgd' (--optimizer sgd)",
        )
    own = _own(model)
    name = options.name or type(own).__name__
    title = c_name(name)
    place = prepared_folder(folder, title, options.force)
    with undisturbed(real=True):
        asked = _asked(own, step, options.budget)
        plan, choice = _planned(asked, title, optimizer_of(step.optimizer), options)
        check_flash(plan, options.flash)
        rounding = round_frozen(asked, plan.layout.memory) if options.stored.frozen == "int8" else None
        recorded = reference(asked, plan.layout, STEPS)
    result = Exported.made(plan, name, place, asked.bytes, rounding, choice)
    _write(place, plan.layout, recorded)
    verify, device = options.verify, options.device
    verdict = NOT_VERIFIED if verify is False else prove(place, plan.layout, recorded, needed=bool(verify))
    core = None if device is None else run_on_core(device, place.resolve(), plan.layout, recorded)
    _describe(place, plan.layout, verdict)
    if core is not None:
        check_flash(plan, options.flash, core)
    return result.proven(verdict, core)


def _stored(frozen: Any, file: bool) -> Stored:
    if frozen not in get_args(Narrow):
        raise UsageError(
            f"frozen_weights={frozen!r}", expected=" or ".join(map(repr, get_args(Narrow))), do="Leave it out"
        )
    return Stored(frozen, file)


def _asked(own: Any, step: StepOptions, budget: Any) -> Request:
    """Check the arguments of the step."""
    asked = request(own, step, PlanOptions(budget=budget), fake=False)
    if not isinstance(asked.budget, int):
        raise UsageError(f"budget={budget!r}", expected="bytes of the device, such as '256 KiB'", do="Give its size")
    return asked


def _planned(
    asked: Request, name: str, optimizer: Any, options: _Options
) -> tuple[DevicePlan, UpdateChoice | None]:  # fmt: skip
    """Plan the step. What the optimizer does not have is frozen, and what a search does not choose."""
    rules = update_rules(optimizer, asked.model)
    _train_only(asked.model, rules.group_of)
    if options.batches is None:
        return planned_step(name, asked, *_captured(asked), rules, options.stored), None
    ram = cache(lambda: ram_of_updates(asked, _captured(asked)[0], rules, options.stored))  # once the data is checked
    choice = chosen_update(asked, rules, options.batches, lambda paths, levers: ram()(paths, levers))
    _train_only(asked.model, [one.path for one in choice.trained])
    return planned_step(name, asked, *_captured(asked), update_rules(optimizer, asked.model), options.stored), choice


def _train_only(model: nn.Module, paths: Collection[str]) -> None:
    for path, one in model.named_parameters():
        one.requires_grad_(path in paths)


def _write(folder: Path, layout: StepLayout, recorded: Recorded) -> None:
    """Write everything but the README."""
    name = layout.name
    files = {
        f"{name}.c": program_text(layout),
        f"{name}.h": companion_files.header_text(layout),
        **({} if layout.weights_file else {f"{name}_weights.h": weights_text(layout)}),
        f"test_{name}.c": companion_files.repeating_text(layout, recorded),
        "Makefile": companion_files.makefile_text(layout),
        f"{name}.json": companion_files.tensors_text(layout),
    }
    for file, text in files.items():
        write_whole(folder / file, text)
    if layout.weights_file:
        write_whole(folder / f"{name}.bin", weights_bytes(layout))
    _describe(folder, layout, NOT_VERIFIED)


def _describe(folder: Path, layout: StepLayout, verdict: Verdict) -> None:
    write_whole(folder / "README.md", companion_files.readme_text(layout, str(verdict)))


def _own(model: Any) -> Any:
    """Return a copy of the model, with contiguous parameters."""
    made = model if isinstance(model, nn.Module) else model() if callable(model) else model
    if not isinstance(made, nn.Module):
        return made  # what refuses it says why
    own = copy_module(made)
    for path, one in (*own.named_parameters(), *own.named_buffers()):
        if one.dtype not in (torch.float32, torch.int64):
            raise InputError(
                f"{path} in {str(one.dtype).removeprefix('torch.')}",
                expected="float32 throughout",
                do="Use model.float()",
            )
        if not bool(torch.isfinite(one).all()):
            raise InputError(
                f"{path} has elements that are not finite", expected="weights that can be trained", do="Mend them"
            )
        one.data = one.data.contiguous()
    return own


def _captured(asked: Request) -> tuple[Captured, Captured]:
    """Capture the step, and the model alone in evaluation mode."""
    model, targets = asked.model, getattr(asked.step, "targets", 0)
    with sdpa_kernel(SDPBackend.MATH):
        step = capture(asked.step, asked.call)
        args, kwargs = asked.call.rebuild(asked.call.tensors)
        with _evaluating(model):
            return step, capture(model, call_of(args[: len(args) - targets], kwargs))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
