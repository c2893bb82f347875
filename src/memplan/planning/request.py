"""What `plan` and `fit` are asked for, checked: the model, its step, the call and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import parse_bytes
from memplan.devices import find
from memplan.devices.model import Device
from memplan.errors import DeviceError, InputError, TargetError, UnitError, UsageError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import WithLoss
from memplan.planning.capture.side_effects import is_fake
from memplan.planning.graph.placement import Home, home_of
from memplan.planning.graph.precision import UNSCALED
from memplan.planning.settings import Allow, Engine, Settings
from memplan.trace.records import HOST
from memplan.trace.step import StepOptions


@dataclass(frozen=True)
class Request:
    """A checked request."""

    model: nn.Module
    """The user's."""
    step: nn.Module
    """What is captured: model and loss, or the model alone."""
    call: Call
    autocast: torch.dtype | None
    """The one that was asked for, or the caller's own."""
    settings: Settings
    notes: tuple[str, ...] = ()

    @contextmanager
    def under_autocast(self) -> Iterator[None]:
        """The autocast that the step runs under."""
        with nullcontext() if self.autocast is None else torch.autocast(self.settings.home.type, dtype=self.autocast):
            yield


def request(
    model: Any,
    inputs: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any],
    targets: Any,
    loss: Callable[..., Any] | None,
    budget: Any,
    autocast: torch.dtype | str | None,
    device: str | torch.device | None,
    allow: Allow,
    clip_norm: float | None,
    accumulate: int,
    settings: Settings,
    fake: bool,
) -> Request:
    """Check what was asked for, and make what is described only.

    Args:
        settings: what needs no check: optimizer, early, heuristics, costs, plan.
        fake: nothing of a model that is still to be made, nor of inputs that are described, is allocated.

    Raises:
        UsageError: one of its kinds, for each argument that cannot be.
    """
    _check_engine(settings.engine)
    _check_early(settings, accumulate, clip_norm)
    _check_allow(allow, settings)
    size, budgeted = _budget(budget)
    card, notes = _card(device) or budgeted, tuple[str, ...]()
    targets = tuple(targets) if isinstance(targets, (list, tuple)) else (targets,)
    options = StepOptions(inputs, kwargs, targets, loss, settings.optimizer, autocast).checked()
    with _torch.fake_tensors() if fake and not isinstance(model, nn.Module) else nullcontext():
        made = _made(model)
        _check_data(made, fake)
        args, keywords = _real((*options.inputs, *options.targets)), _real(dict(options.kwargs))
    if targets and loss is None:
        raise InputError(f"{len(targets)} target(s) and no loss", expected="a loss that takes them", do="Give the loss")
    step = made if loss is None else WithLoss(made, loss, len(targets))
    if settings.gradients.updates:
        _check_apart(step)
    call = call_of(args, keywords)
    held, home = settings.gradients.adds or accumulate > 1, home_of(step, call.tensors)
    settings = replace(
        settings, budget=size, device=card, gradients=settings.gradients.held(held), allow=allow, home=home
    )
    settings = replace(settings, host_memory=settings.host_memory or home.card is not None)
    _check_compiler(settings)
    if budgeted is not None:
        notes = (_of_card(budgeted, home),)
    assert options.autocast is None or isinstance(options.autocast, torch.dtype), "options were checked"
    lower = options.autocast or _around(home.type)
    if torch.float16 in _computes_in(made, lower):
        notes = (*notes, UNSCALED)
    return Request(made, step, call, lower, settings, notes)


def _around(place: str) -> torch.dtype | None:
    """What the caller's own autocast computes in, where one is on."""
    return torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else None


def _computes_in(model: nn.Module, autocast: torch.dtype | None) -> set[torch.dtype]:
    """The dtypes of the parameters that are trained, and that of the autocast."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return found if autocast is None else found | {autocast}


def _check_allow(allow: str, settings: Settings) -> None:
    if allow not in get_args(Allow):
        raise UsageError(
            f"allow={allow!r}",
            expected="'exact', which changes no bit, or 'lossy', which may compute and save in fewer bits",
            do="Leave it out for 'exact'",
        )
    if allow == "exact" and settings.plan is not None and settings.plan.precision.lossy:
        raise UsageError(
            f"The plan is lossy ({settings.plan.precision}), and allow is 'exact'",
            expected="a plan that changes no bit",
            do="Allow it: allow='lossy' (--allow lossy), or plan this step anew",
        )


def _check_engine(engine: str) -> None:
    if engine not in get_args(Engine):
        raise UsageError(
            f"engine={engine!r}", expected=" or ".join(map(repr, get_args(Engine))), do="Leave it out"
        )  # fmt: skip


def _check_compiler(settings: Settings) -> None:
    """Raises UsageError where fused kernels are asked for, and what makes them is not there."""
    if settings.engine == "graph":
        return
    if settings.home.card is not None:
        missing = _torch.card_compiler_misses(settings.home.name)
        if missing is not None:
            raise UsageError(
                f"engine='inductor' on {settings.home.name}, and {missing}",
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


def _check_early(settings: Settings, accumulate: int, clip_norm: float | None) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}", expected="how many micro-batches make one update, at least 1")
    if not settings.gradients.updates:
        return
    if settings.optimizer is None:
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
    """Raises UsageError where an early update of a parameter would change another one, or a buffer."""
    named = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if _torch.peculiarity(tensor) is None and tensor.numel()
    }
    places = sorted((_torch.storage_key(one.untyped_storage()), *_reach(one), name) for name, one in named.items())
    before = (0, 0, "")
    """Of those so far the one that ends last: storage, end, name."""
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
    """Bytes of its storage at which a tensor begins and ends."""
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _of_card(card: Device, home: Home) -> str:
    """The note on a budget that a card's name stood for."""
    kernels = "the CPU's kernels, in allocated bytes" if home.card is None else f"the kernels of {home.card.title}"
    return f"the budget is what {card.title} has, less its context; planned with {kernels}"


def _budget(budget: Any) -> tuple[int, Device | None]:
    if budget is None:
        raise UsageError("No budget", expected="bytes, such as '6 GiB', or a card's name", do="Give budget")
    try:
        return parse_bytes(budget), None
    except UnitError:
        if not isinstance(budget, str):
            raise
    try:
        card = find(budget)
    except DeviceError:
        return parse_bytes(budget), None  # raises what is wrong with it as a size
    return card.usable("high"), card


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
            do="Make it anew, or use memplan.plan, which runs nothing",
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
    from memplan.trace.spec import Spec

    return _torch.tree_map(lambda leaf: leaf.make() if isinstance(leaf, Spec) else leaf, value)
