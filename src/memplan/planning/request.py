"""Check the arguments of `plan` and `fit`: the model, its step, the call, the budget and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.devices import Device, find
from memplan.errors import DeviceError, InputError, TargetError, UsageError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import WithLoss
from memplan.planning.capture.side_effects import is_fake
from memplan.planning.capture.subclassed import output_kinds
from memplan.planning.graph.placement import Home, home_of
from memplan.planning.graph.precision import UNSCALED
from memplan.planning.relative_budget import Relative, read_any_budget
from memplan.planning.settings import Allow, Engine, PlanOptions, Settings
from memplan.trace.records import HOST
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions


@dataclass(frozen=True)
class Request:
    """Checked arguments of a plan."""

    model: nn.Module
    """The user's."""
    step: nn.Module
    """Module that is captured: model and loss, or the model alone."""
    call: Call
    autocast: torch.dtype | None
    """The one that was asked for, or the caller's own."""
    settings: Settings
    budget: int | Relative
    """Bound on everything on the device at any moment of the step: bytes, or what `bounded` makes bytes."""
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Budget in bytes."""
        assert isinstance(self.budget, int), "it is bounded"
        return self.budget

    def bounded(self, eager: int) -> Request:
        """Return the request with its budget in bytes. ``eager``: bytes that the step takes without a plan."""
        if not isinstance(self.budget, Relative):
            return self
        budget = self.budget.of(eager)
        note = f"the budget is {format_bytes(budget)}: {self.budget.said(eager)}"
        return replace(self, budget=budget, notes=(*self.notes, note))

    @contextmanager
    def under_autocast(self) -> Iterator[None]:
        """Enter the autocast that the step runs under."""
        with nullcontext() if self.autocast is None else torch.autocast(self.settings.home.type, dtype=self.autocast):
            yield


def request(model: Any, step: StepOptions, options: PlanOptions, *, fake: bool) -> Request:
    """Check the arguments of a plan, and make the model and the inputs that are only described.

    Args:
        model: a module, or a callable that makes one.
        step: its inputs, loss and optimizer.
        options: everything else.
        fake: allocate neither a model that is still to be made nor inputs that are described.

    Raises:
        UsageError: one of its kinds, for each argument that cannot be.
    """
    _check_engine(options.engine)
    _check_early(step, options)
    _check_allow(options)
    budget, budgeted = _budget(options.budget)
    card, step = _card(options.device) or budgeted, step.checked()
    with _torch.fake_tensors() if fake and not isinstance(model, nn.Module) else nullcontext():
        made = _made(model)
        _check_data(made, fake)
        args, keywords = _real((*step.inputs, *step.targets)), _real(dict(step.kwargs))
    module = _with_loss(made, step)
    if options.gradients.updates:
        _check_apart(module)
    call = call_of(args, keywords)
    output_kinds(module, call)  # said before anything is planned, where a plan would not equal eager
    home = home_of(module, call.tensors)
    _check_compiler(options.engine, home)
    settings = Settings(
        optimizer=step.callables[1], gradients=options.gradients.held(options.accumulate > 1), home=home, device=card,
        costs=options.costs, heuristics=options.heuristics, plan=options.plan, engine=options.engine,
        host_memory=options.host_memory or home.card is not None, allow=options.allow,
    )  # fmt: skip
    assert step.autocast is None or isinstance(step.autocast, torch.dtype), "options were checked"
    lower = step.autocast or _around(home.type)
    notes = () if budgeted is None else (_of_card(budgeted, home),)
    if torch.float16 in _computes_in(made, lower):
        notes = (*notes, UNSCALED)
    return Request(made, module, call, lower, settings, budget, notes)


def _with_loss(model: nn.Module, step: StepOptions) -> nn.Module:
    """Return the module that is captured: the model with its loss, or the model alone."""
    loss, _ = step.callables
    if loss is not None:
        return WithLoss(model, loss, len(step.targets))
    if step.targets:
        count = len(step.targets)
        raise InputError(f"{count} target(s) and no loss", expected="a loss that takes them", do="Give the loss")
    return model


def _around(place: str) -> torch.dtype | None:
    """Return the dtype of the caller's own autocast, where one is on."""
    return torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None


def _computes_in(model: nn.Module, autocast: torch.dtype | None) -> set[torch.dtype]:
    """Return the dtypes of the parameters that are trained, and that of the autocast."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return found if autocast is None else found | {autocast}


def _check_allow(options: PlanOptions) -> None:
    allow, plan = options.allow, options.plan
    if allow not in get_args(Allow):
        raise UsageError(
            f"allow={allow!r}",
            expected="'exact', which changes no bit, or 'lossy', which may compute and save in fewer bits",
            do="Leave it out for 'exact'",
        )
    if allow == "exact" and plan is not None and plan.precision.lossy:
        raise UsageError(
            f"The plan is lossy ({plan.precision}), and allow is 'exact'",
            expected="a plan that changes no bit",
            do="Allow it: allow='lossy' (--allow lossy), or plan this step again",
        )


def _check_engine(engine: str) -> None:
    if engine not in get_args(Engine):
        raise UsageError(
            f"engine={engine!r}", expected=" or ".join(map(repr, get_args(Engine))), do="Leave it out"
        )  # fmt: skip


def _check_compiler(engine: Engine, home: Home) -> None:
    """Raise UsageError where the compiler of fused kernels is asked for and missing."""
    if engine == "graph":
        return
    if home.card is not None:
        missing = _torch.card_compiler_misses(home.name)
        if missing is not None:
            raise UsageError(
                f"engine='inductor' on {home.name}, and {missing}",
                expected="what torch.compile needs there: Triton, which builds of torch for CUDA bring along",
                do="Install it, or leave engine out: 'graph' runs torch's own kernels and needs none",
            )
        return
    try:
        compiler = _torch.cpp_compiler()
    except OSError as error:  # it makes the directory when it is imported
        raise UsageError(
            f"engine='inductor', and Inductor cannot make the directory of its cache ({error})",
            expected="one that can be written to: what the environment's TORCHINDUCTOR_CACHE_DIR names, else TMPDIR",
            do="Set that, or leave engine out: 'graph' compiles nothing",
        ) from error
    if compiler is None:
        raise UsageError(
            "engine='inductor', and no C++ compiler was found",
            expected="one that Inductor can call: g++, clang++, or what the environment's CXX names",
            do="Install one, or leave engine out: 'graph' runs torch's own kernels and needs none",
        )


def _check_early(step: StepOptions, options: PlanOptions) -> None:
    accumulate, clip_norm = options.accumulate, options.clip_norm
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}", expected="how many micro-batches make one update, at least 1")
    if not options.gradients.updates:
        return
    if step.optimizer is None:
        raise UsageError(
            "early=True without an optimizer", expected="the optimizer that is to update early", do="Give optimizer"
        )
    if accumulate > 1:
        raise UsageError(
            f"early=True with accumulate={accumulate}",
            expected="one backward pass for each update: a gradient that is to grow over micro-batches cannot be "
            "applied and freed after the first",
            do="Leave one of the two out",
        )
    if clip_norm is not None:
        raise UsageError(
            f"early=True with clip_norm={clip_norm}",
            expected="no clipping by the global norm: that is known only when all gradients are there, and early "
            "updates free each before the next is made",
            do="Leave one of the two out, or clip each gradient by its value in a hook",
        )


def _check_apart(model: nn.Module) -> None:
    """Raise UsageError where an early update of a parameter would change another one, or a buffer."""
    named = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if _torch.peculiarity(tensor) is None and tensor.numel()
    }
    places = sorted((_torch.storage_key(one.untyped_storage()), *_reach(one), name) for name, one in named.items())
    before = (0, 0, "")
    """The one that ends last of those so far: storage, end, name."""
    for storage, begin, end, name in places:
        shares = storage == before[0] and begin < before[1]
        if shares and (named[name].requires_grad or named[before[2]].requires_grad):
            raise UsageError(
                f"early=True, and {before[2]} and {name} share memory",
                expected="parameters with memory of their own: an early update of one would change the other, which "
                "may still be read",
                do="Use one Parameter in both places, or leave early out",
            )
        before = max(before, (storage, end, name))


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage at which a tensor begins and ends."""
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _of_card(card: Device, home: Home) -> str:
    """Return the note on a budget that a card's name stood for."""
    kernels = "the CPU's kernels, in allocated bytes" if home.card is None else f"the kernels of {home.card.title}"
    return f"the budget is what {card.title} has, less its context; planned with {kernels}"


def _budget(budget: Any) -> tuple[int | Relative, Device | None]:
    if budget is None:
        expected = "bytes, such as '6 GiB', a share of the step without a plan, such as '70%', or a card's name"
        raise UsageError("No budget", expected=expected, do="Give budget")
    size = read_any_budget(budget)
    return (size.usable("high"), size) if isinstance(size, Device) else (size, None)


def _card(device: str | torch.device | None) -> Device | None:
    return None if device is None or str(device).lower() == HOST else find(str(device))


def _made(model: Any) -> nn.Module:
    made = model if isinstance(model, nn.Module) else model() if callable(model) else model
    if not isinstance(made, nn.Module):
        raise TargetError(
            f"{type(made).__name__} {made!r:.60}", expected="a module, or a callable that makes one", do="Pass one"
        )
    return made


def _check_data(model: nn.Module, fake: bool) -> None:
    if not fake and is_fake(model):
        raise InputError(
            f"The model {type(model).__name__} is without data: it was made under fake tensors",
            expected="one that can run",
            do="Make it again with data, or use memplan.plan, which runs nothing",
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not fake and tensor.is_meta:
            raise DeviceError(
                f"{name} is on meta",
                expected="a module with data, on the CPU or on a CUDA card",
                do="Move it by to_empty(device=...) and load its weights, or use memplan.plan, which runs nothing",
            )


def _real(value: Any) -> Any:
    """Specs as tensors; tensors stay the user's."""
    return _torch.tree_map(lambda leaf: leaf.make() if isinstance(leaf, Spec) else leaf, value)
