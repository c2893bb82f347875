"""`memplan.export` writes a model's training step as C99 for a small device, within a budget of RAM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplan._bytes import parse_bytes
from memplan._text import write_whole
from memplan._torch.recurrent import recurrent_replaced
from memplan.errors import InputError, RecordingError, UsageError
from memplan.exporting.c_text import c_name
from memplan.exporting.device_plan import (
    DevicePlan,
    StorageOptions,
    WeightType,
    largest_input,
    planned_step,
    ram_by_trained_set,
)
from memplan.exporting.exported import Exported
from memplan.exporting.flash import check_flash
from memplan.exporting.folder import SHARED_FILE, prepared_folder, replace_files
from memplan.exporting.frozen_int8 import Int8Step, int8_step
from memplan.exporting.int8_training import check_any, check_rules, rounded_weights
from memplan.exporting.lowering.recurrent_layers import recurrent_functions
from memplan.exporting.optimizer_rules import Gradients, update_rules
from memplan.exporting.rounding import round_frozen
from memplan.exporting.source import companion_files
from memplan.exporting.source.companion_files import Recorded
from memplan.exporting.source.program_text import program_text
from memplan.exporting.source.readme import readme_text
from memplan.exporting.source.step_layout import StepLayout
from memplan.exporting.source.stored_weights import weights_bytes, weights_text
from memplan.exporting.step_outputs import CapturedStep, DeviceStep, Normalization, capture_step, device_step
from memplan.exporting.trials.cortex import CortexRun, run_on_core
from memplan.exporting.trials.int8_updates import UpdatesChecked, check_updates
from memplan.exporting.trials.proving import NOT_VERIFIED, Verdict, prove
from memplan.exporting.trials.reference_steps import int8_losses, run_reference_steps
from memplan.exporting.update_search import UpdateChoice, chosen_update
from memplan.planning.capture.flat_call import call_of
from memplan.planning.request import Request
from memplan.planning.request import request as make_request
from memplan.planning.settings import PlanOptions
from memplan.trace.naming.step_parts import Loss, Optimizer, optimizer_of
from memplan.trace.recording.session import public, undisturbed
from memplan.trace.step import StepOptions, copy_module

STEPS = 20
"""Training steps that the C test repeats."""


@dataclass(frozen=True)
class _Options:
    """The arguments of `export` that do not describe the step."""

    budget: Any
    name: str | None
    stored: StorageOptions
    flash: int | None
    """Bytes; None: no bound."""
    batches: Any
    """On which a search chooses the parameters to train; None: no search."""
    verify: bool | None
    device: str | None
    force: bool
    gradients: Gradients
    normalization: Normalization | None
    calibrate: Any
    """Batches on which the frozen part is quantized; None: it stays in float32."""
    input_in_arena: bool


@public
def export(
    model: Any,
    *inputs: Any,
    targets: Any = (),
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    normalize: Any = None,
    budget: Any = "256 KiB",
    folder: str | Path,
    name: str | None = None,
    search_update: Any = None,
    frozen_weights: WeightType = "float32",
    frozen_layers: WeightType = "float32",
    trained_weights: WeightType = "float32",
    calibrate: Any = None,
    weights_file: bool = False,
    arena_apart: bool = False,
    input_in_arena: bool = False,
    flash: Any = None,
    verify: bool | None = None,
    device: str | None = None,
    force: bool = False,
) -> Exported:
    """Write a training step as C99 that needs only libm: forward, backward and update, in an arena of fixed size.

    The model is not changed. Layers in training mode update their running statistics. Parameters that require no
    gradient stay in flash, and the backward pass stops where no parameter below requires one.

    Args:
        model: a module with parameters in float32, or a callable that returns one.
        inputs, targets, loss: as for `memplan.explain`. The exported step has their shapes.
        optimizer: SGD, Adam, AdamW, RMSprop or Adagrad of torch: a name ("sgd:lr=0.1") or a callable of parameters.
        accumulate: calls of the C step whose gradients are summed for one update, as `backward()` does. For their mean,
            divide the loss by it.
        clip_norm, clip_value: bounds of the gradients before an update, as for `torch.nn.utils.clip_grad_norm_` and
            `torch.nn.utils.clip_grad_value_`.
        normalize: ``(mean, std)`` of inputs in uint8 or int8, such as ``"1x3x64x64:uint8<256"``: numbers, or one for
            each channel. The model sees ``(x - mean) / std``. None: it reads the bytes, and may cast them itself.
        budget: bytes of RAM for trained weights, optimizer state, running statistics, inputs and the arena.
        folder: where to write the files; created if missing.
        name: name of files and functions; None: the name of the model's class.
        search_update: batches of inputs and targets; their gradients decide which parameters are trained within the
            budget.
        frozen_weights: ``"int8"`` stores weights that are not trained as int8, and measures the error.
        frozen_layers: ``"int8"`` computes layers before the first trained one in eight bits, and measures the error.
        trained_weights: ``"int8"`` trains convolutions and linear layers in weights of eight bits, by SGD without
            momentum, and measures the effect. Lossy.
        calibrate: batches of inputs and targets for `frozen_layers`: the ranges of activations are those on this data.
        weights_file: write weights to NAME.bin, which the caller of the C code reads, instead of NAME_weights.h.
        arena_apart: `init` takes memory for the arena, so that it and the state can lie in banks of their own.
        input_in_arena: the largest input lies in the arena, where other buffers take its place after its last use; the
            header has a macro for its address.
        flash: most bytes of weights and code; None: no bound.
        verify: compile the files, run them under sanitizers and compare the results with PyTorch; None: if there is a C
            compiler.
        device: ``"cortex-m4"`` or ``"cortex-m7"``: also compile for this core, and run the steps on an emulator.
        force: write into a folder with other files.

    Raises:
        BudgetError: the step does not fit; ``smallest_budget`` is the smallest that does, of RAM or of flash.
        RecordingError: an operation has no kernel (layer and line are named), or the step cannot be captured.
        UsageError: an argument is wrong.
        VerificationError: the C code does not compute what PyTorch does; the files stay for inspection.

    Example:
        >>> done = memplan.export(
        ...     model, "1x3x16x16", targets="1:int64<10", loss="cross_entropy", optimizer="sgd:lr=0.1",
        ...     budget="512 KiB", folder="device", name="net", verify=False,
        ... )
        >>> done.ram <= 512 << 10
        True
    """
    flash_bytes = None if flash is None else parse_bytes(flash)
    types_of = {"frozen_weights": frozen_weights, "frozen_layers": frozen_layers, "trained_weights": trained_weights}
    for option, type in types_of.items():
        if type not in get_args(WeightType):
            types = " or ".join(map(repr, get_args(WeightType)))
            raise UsageError(f"{option}={type!r}", expected=types, do="Leave it out")
    if (frozen_layers == "int8") != (calibrate is not None):
        raise UsageError(
            "frozen_layers='int8' without calibrate" if calibrate is None else "calibrate without frozen_layers='int8'",
            expected="both, or neither: the ranges of activations are those on your data",
            do="Give frozen_layers='int8' and calibrate=[(x, y), ...] (--frozen-layers int8 --calibrate TARGET)",
        )
    stored = StorageOptions(frozen_weights, trained_weights, weights_file, arena_apart)
    options = _Options(
        budget, name, stored, flash=flash_bytes, batches=search_update, verify=verify, device=device, force=force,
        gradients=Gradients(accumulate, clip_norm, clip_value),
        normalization=None if normalize is None else Normalization.of(normalize), calibrate=calibrate,
        input_in_arena=input_in_arena,
    )  # fmt: skip
    return _exported(model, StepOptions(inputs, {}, targets, loss, optimizer, autocast=None), Path(folder), options)


def _exported(model: Any, step: StepOptions, folder: Path, options: _Options) -> Exported:
    """Do the work of `export`: plan the step of a copy of the model, write the files, verify them, write the
    verdict."""
    if step.optimizer is None:
        raise UsageError(
            "No optimizer",
            expected="SGD, Adam, AdamW, RMSprop or Adagrad: the step updates weights",
            do="Give optimizer='sgd' (--optimizer sgd)",
        )
    copied = device_copy(model)
    name = options.name or type(copied).__name__
    identifier = c_name(name)
    folder = prepared_folder(folder, identifier, options.force)
    with undisturbed(real=True):
        request = make_request(copied, step, PlanOptions(budget=options.budget), fake=False)
        if not isinstance(request.budget, int):
            raise UsageError(
                f"budget={options.budget!r}", expected="bytes of the device, such as '256 KiB'", do="Give its size"
            )
        request = replace(request, step=DeviceStep.of(request.step, options.normalization))
        if options.input_in_arena:
            options = replace(options, stored=replace(options.stored, arena_input=largest_input(request)))
        original = model if isinstance(model, nn.Module) else copied
        plan, choice, int8 = _planned(request, original, identifier, optimizer_of(step.optimizer), options)
        check_flash(plan, options.flash)
        if options.input_in_arena and plan.layout.arena_input is None:
            raise InputError(
                "input_in_arena=True, and no op of the step reads the largest input",
                expected="an input to compute with", do="Leave it out",
            )  # fmt: skip
        if options.stored.trained_type == "int8":
            check_any(plan.layout.memory)
        rounding = round_frozen(request, plan.layout.memory) if options.stored.frozen_type == "int8" else None
        # the model has rounded weights from here on; of those that are trained in int8: their elements in float32
        float_elements, int8_trained = rounded_weights(request, plan.layout.memory), None
        recorded = run_reference_steps(request, plan.layout, STEPS, int8)
        if float_elements:
            int8_trained = int8_losses(request, plan.layout, STEPS, int8, float_elements)
    int8_frozen = None if int8 is None else int8.report
    result = Exported.of_plan(
        plan, name, folder, request.bytes, rounding, choice, int8=int8_frozen, int8_trained=int8_trained
    )
    _write(folder, plan.layout, recorded)
    verdict = NOT_VERIFIED
    if options.verify is not False:
        check = partial(_updates_checked, request, plan.layout, int8) if float_elements else None
        verdict = prove(folder, plan.layout, recorded, needed=bool(options.verify), check=check)
    core = None
    if options.device is not None:
        core = run_on_core(options.device, folder.resolve(), plan.layout, recorded)
    _write_readme(folder, plan.layout, verdict, core)
    if core is not None:
        check_flash(plan, options.flash, core)
    return result.with_verdict(verdict, core)


def _updates_checked(
    request: Request, layout: StepLayout, int8: Int8Step | None, states: np.ndarray, losses: np.ndarray
) -> UpdatesChecked:
    """Compare each step of the device with one of PyTorch: `check_updates`, run reproducibly (see `undisturbed`)."""
    with undisturbed(real=True):
        return check_updates(request, layout, int8, states, losses)


def _planned(
    request: Request, original: nn.Module, name: str, optimizer: Any, options: _Options
) -> tuple[DevicePlan, UpdateChoice | None, Int8Step | None]:  # fmt: skip
    """Plan the step, after freezing the parameters that are not the optimizer's or that a search does not choose."""
    rules = update_rules(optimizer, request.model, original, options.gradients)
    if options.stored.trained_type == "int8":
        check_rules(rules)
    train_only(request.model, rules.group_of)
    choice = None
    if options.batches is not None:
        # Capturing waits until the first set is planned: by then the batches are checked.
        ram = cache(lambda: ram_by_trained_set(captured_passes(request)[0], rules, options.stored))
        choice = chosen_update(request, rules, options.batches, lambda paths, levers: ram()(paths, levers))
        train_only(request.model, [candidate.path for candidate in choice.trained])
        rules = update_rules(optimizer, request.model, original, options.gradients)
    passes = captured_passes(request)
    int8 = None if options.calibrate is None else int8_step(request, passes, options.calibrate)
    passes = passes if int8 is None else int8.int8_passes
    return planned_step(name, request, *passes, rules, options.stored), choice, int8


def train_only(model: nn.Module, paths: Collection[str]) -> None:
    """Let the parameters of these names require a gradient, and no others."""
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in paths)


def _write(folder: Path, layout: StepLayout, recorded: Recorded) -> None:
    """Write all files; the README says that they are not verified."""
    name = layout.name
    files: dict[str, str | bytes] = {
        f"{name}.c": program_text(layout),
        f"{name}.h": companion_files.header_text(layout),
        **({} if layout.weights_file else {f"{name}_weights.h": weights_text(layout)}),
        f"test_{name}.c": companion_files.repeating_text(layout, recorded),
        SHARED_FILE: companion_files.makefile_text(),
        f"{name}.json": companion_files.tensors_text(layout),
    }
    if layout.weights_file:
        files[f"{name}.bin"] = weights_bytes(layout)
    files[f"{name}.md"] = readme_text(layout, str(NOT_VERIFIED))
    replace_files(folder, name, files)


def _write_readme(folder: Path, layout: StepLayout, verdict: Verdict, core: CortexRun | None) -> None:
    """Write the README again, with what the runs here and on an emulated core showed."""
    verified = "\n\n".join(str(run) for run in (verdict, core) if run is not None)
    write_whole(folder / f"{layout.name}.md", readme_text(layout, verified))


def device_copy(model: Any) -> Any:
    """Return a copy of the model with contiguous parameters.

    Anything but a module or a callable that returns one is returned as it is: the request refuses it.

    Raises:
        InputError: a parameter or buffer is not in float32, or not finite; a batch norm has no momentum.
    """
    module = model if isinstance(model, nn.Module) else model() if callable(model) else model
    if not isinstance(module, nn.Module):
        return module
    copied = copy_module(module)
    for path, tensor in (*copied.named_parameters(), *copied.named_buffers()):
        if tensor.dtype not in (torch.float32, torch.int64):
            raise InputError(
                f"{path} in {str(tensor.dtype).removeprefix('torch.')}",
                expected="float32 throughout",
                do="Use model.float()",
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{path} has elements that are not finite", expected="weights that can be trained", do="Mend them"
            )
        tensor.data = tensor.data.contiguous()
    for path, layer in copied.named_modules():
        statistics = getattr(layer, "track_running_stats", False) and layer.training
        if statistics and getattr(layer, "momentum", 0.0) is None:
            raise InputError(
                f"{path}: momentum=None", expected="running statistics with a momentum: a mean over all batches needs "
                "their number in each step", do="Give such as momentum=0.1, or put the layer into evaluation mode",
            )  # fmt: skip
    return copied


def captured_passes(request: Request) -> tuple[CapturedStep, CapturedStep]:
    """Capture the step, and its forward pass in evaluation mode: without the loss, where the model itself returns it,
    or where it cannot be computed of what the model returns then."""
    with_loss = device_step(request)
    with sdpa_kernel(SDPBackend.MATH), recurrent_replaced(recurrent_functions()):
        step = capture_step(with_loss, request.call)
        with _evaluating(request.model):
            if with_loss.has_loss:
                with suppress(RecordingError):
                    return step, capture_step(with_loss, request.call).forward_only(loss=True)
            args, kwargs = request.call.rebuild(request.call.tensors)
            model_alone = DeviceStep(request.model, loss=None, targets=0, normalization=with_loss.normalization)
            call = call_of(args[: len(args) - with_loss.targets], kwargs)
            return step, capture_step(model_alone, call).forward_only(loss=False)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation mode; afterwards each module has its own flag back."""
    training_flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in training_flags:
            module.training = training
