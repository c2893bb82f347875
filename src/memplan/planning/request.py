"""Check the arguments of `plan` and `fit`: the model, its step, the call, the budget and the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.devices import Device, find
from memplan.errors import DeviceError, InputError, StepError, TargetError, UsageError
from memplan.planning.capture.flat_call import Call, call_of
from memplan.planning.capture.loss_module import WithLoss
from memplan.planning.capture.side_effects import is_fake
from memplan.planning.capture.subclassed import output_kinds
from memplan.planning.graph.placement import Home, as_occupied, home_of
from memplan.planning.graph.precision import UNSCALED
from memplan.planning.relative_budget import Relative, read_any_budget
from memplan.planning.settings import Allow, Engine, PlanOptions, Settings
from memplan.trace.record import construct
from memplan.trace.recording.session import choose_target
from memplan.trace.records import HOST
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions


@dataclass(frozen=True)
class Request:
    """Checked arguments of a plan."""

    model: nn.Module
    """The user's model."""
    step: nn.Module
    """Module that is captured: model and loss, or the model alone."""
    call: Call
    autocast: torch.dtype | None
    """Dtype of the requested autocast, else of the caller's."""
    settings: Settings
    budget: int | Relative
    """Limit of all memory on the device at any time of the step: bytes, or relative until `bounded`."""
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Budget in bytes."""
        assert isinstance(self.budget, int), "bounded() was called"
        return self.budget

    def bounded(self, eager: int) -> Request:
        """Return the request with its budget in bytes. ``eager``: peak bytes of the step without a plan."""
        if not isinstance(self.budget, Relative):
            return self
        budget = self.budget.of(eager)
        note = f"the budget is {format_bytes(budget)}: {self.budget.describe(eager)}"
        return replace(self, budget=budget, notes=(*self.notes, note))

    @contextmanager
    def under_autocast(self) -> Iterator[None]:
        """Within this context the step runs under its autocast, if it has any."""
        with nullcontext() if self.autocast is None else torch.autocast(self.settings.home.type, dtype=self.autocast):
            yield


def request(model: Any, step: StepOptions, options: PlanOptions, *, fake: bool) -> Request:
    """Check the arguments of a plan, call the callable that returns the model, and make tensors of specs. With ``fake``
    the model and its inputs are made as fake tensors. Raises UsageError if an argument is invalid (or a subclass of
    UsageError)."""
    if options.engine not in get_args(Engine):
        engines = " or ".join(map(repr, get_args(Engine)))
        raise UsageError(f"engine={options.engine!r}", expected=engines, do="Leave it out")
    _check_early(step, options)
    _check_allow(options)
    budget, budget_card = _parse_budget(options.budget)
    is_card = options.device is not None and str(options.device).lower() != HOST
    card, step = find(str(options.device)) if is_card else budget_card, step.checked()

    def model_and_call() -> tuple[nn.Module, Any, Any]:
        built = _build_model(model)
        _check_data(built, fake)
        return built, _specs_to_tensors((*step.inputs, *step.targets)), _specs_to_tensors(dict(step.kwargs))

    constructs_fakes = fake and not isinstance(model, nn.Module)
    built, args, keywords = _on_fake_tensors(model_and_call) if constructs_fakes else model_and_call()
    loss, optimizer = step.callables
    if loss is None and step.targets:
        raise InputError("targets, and no loss", expected="a loss that takes them", do="Give loss (--loss)")
    if loss is not None:
        _check_takes(loss, len(step.targets))
    module = built if loss is None else WithLoss(built, loss, len(step.targets))
    if options.gradients.updates_early:
        _check_shared_memory(module)
    call = call_of(args, keywords)
    output_kinds(module, call)  # only for its error, if planned results would not equal eager ones
    home = home_of(module, call.tensors)
    _check_compiler(options.engine, home)
    if not is_fake(built):
        home = as_occupied(home, module)
    settings = Settings(
        optimizer=optimizer, gradients=options.gradients.with_accumulation(options.accumulate > 1), home=home,
        device=card, costs=options.costs, heuristics=options.heuristics, plan=options.plan, engine=options.engine,
        host_memory=options.host_memory or home.card is not None, allow=options.allow,
        moments_in_8_bits=options.moments_in_8_bits,
    )  # fmt: skip
    assert step.autocast is None or isinstance(step.autocast, torch.dtype), "options were checked"
    current = torch.get_autocast_dtype(home.type) if torch.is_autocast_enabled(home.type) else None
    autocast, notes = step.autocast or current, list[str]()
    if budget_card is not None:
        kernels = "the CPU's kernels, in allocated bytes" if home.card is None else f"the kernels of {home.card.title}"
        notes.append(f"the budget is what {budget_card.title} has, less its context; planned with {kernels}")
    if torch.float16 in {autocast, *(parameter.dtype for parameter in built.parameters() if parameter.requires_grad)}:
        notes.append(UNSCALED)
    return Request(built, module, call, autocast, settings, budget, tuple(notes))


def _check_takes(loss: Callable[..., Any], targets: int) -> None:
    """Raise InputError for a loss function that does not take an output and this number of targets."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # builtins have none
        return
    try:
        signature.bind(None, *[None] * targets)
    except TypeError as error:
        name = getattr(loss, "__name__", "the loss")
        raise InputError(
            f"the loss {name} and {targets} target(s): {error}",
            expected="a loss of the model's output and the targets",
            do="Give the targets that it takes: targets (--target)",
        ) from None


def _check_allow(options: PlanOptions) -> None:
    """Raise UsageError for an unknown ``allow``, or a plan that loses more than it allows."""
    allow, plan = options.allow, options.plan
    if allow not in get_args(Allow):
        raise UsageError(
            f"allow={allow!r}",
            expected="'exact', which changes no bit, 'reordered', which may add in another order, or 'lossy', which "
            "may compute and save in fewer bits, and store Adam's moments in 8 bits",
            do="Leave it out for 'exact'",
        )
    if allow == "exact" and plan is not None and (plan.tiles or plan.kernels):
        runs = "segments in pieces" if plan.tiles else "groups of ops by kernels"
        raise UsageError(
            f"The plan runs {runs}, which adds in another order, and allow is 'exact'",
            expected="a plan that changes no bit",
            do="Allow it: allow='reordered' (--allow reordered), or plan this step again",
        )
    if allow != "lossy" and plan is not None and plan.precision.lossy:
        raise UsageError(
            f"The plan is lossy ({plan.precision}), and allow is {allow!r}",
            expected="a plan that changes no bit" if allow == "exact" else "a plan that computes in the same precision",
            do="Allow it: allow='lossy' (--allow lossy), or plan this step again",
        )


def _check_compiler(engine: Engine, home: Home) -> None:
    """Raise UsageError if fused kernels are requested and there is no compiler."""
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
    except OSError as error:  # importing Inductor creates the directory
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
    """Raise UsageError for an invalid ``accumulate``, or for early updates that the step does not support."""
    accumulate, clip_norm = options.accumulate, options.clip_norm
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r}", expected="how many micro-batches make one update, at least 1")
    if not options.gradients.updates_early:
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


def _check_shared_memory(model: nn.Module) -> None:
    """Raise UsageError if an early update of a parameter would change another parameter or a buffer."""
    named = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if _torch.untraceable_reason(tensor) is None and tensor.numel()
    }
    ranges = sorted((_torch.storage_key(t.untyped_storage()), *_byte_range(t), name) for name, t in named.items())
    # Sorted by where they begin, a tensor overlaps an earlier tensor if it begins before the furthest end so far.
    furthest = (0, 0, "")  # (storage, end, name) of the tensor with the furthest end
    for storage, begin, end, name in ranges:
        furthest_storage, furthest_end, other = furthest
        shares = storage == furthest_storage and begin < furthest_end
        if shares and (named[name].requires_grad or named[other].requires_grad):
            raise UsageError(
                f"early=True, and {other} and {name} share memory",
                expected="parameters with memory of their own: an early update of one would change the other, which "
                "may still be read",
                do="Use one Parameter in both places, or leave early out",
            )
        furthest = max(furthest, (storage, end, name))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets in bytes at which a tensor begins and ends in its storage."""
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _parse_budget(budget: Any) -> tuple[int | Relative, Device | None]:
    """Return the budget, and the card if the budget is a card's name: the budget is then its usable bytes."""
    if budget is None:
        expected = "bytes, such as '6 GiB', a share of the step without a plan, such as '70%', or a card's name"
        raise UsageError("No budget", expected=expected, do="Give budget")
    size = read_any_budget(budget)
    return (size.usable("high"), size) if isinstance(size, Device) else (size, None)


def _build_model(model: Any) -> nn.Module:
    """Return the module, or what the callable returns. Raises TargetError if that is no module."""
    built = model() if callable(model) and not isinstance(model, nn.Module) else model
    if not isinstance(built, nn.Module):
        raise TargetError(
            f"{type(built).__name__} {built!r:.60}", expected="a module, or a callable that makes one", do="Pass one"
        )
    return built


_Constructed = TypeVar("_Constructed")


def _on_fake_tensors(make: Callable[[], _Constructed]) -> _Constructed:
    """Return what ``make`` constructs, on fake tensors of the CPU. Its exceptions are raised unchanged."""
    try:
        return construct(make, choose_target(HOST))
    except StepError as error:
        raised = error.__cause__ or error
    raise raised  # outside of the except block, which would replace its context


def _check_data(model: nn.Module, fake: bool) -> None:
    """Raise InputError or DeviceError if the model is to run (not ``fake``) but its tensors have no data."""
    if fake:
        return
    if is_fake(model):
        raise InputError(
            f"The model {type(model).__name__} is without data: it was made under fake tensors",
            expected="one that can run",
            do="Make it again with data, or use memplan.plan, which runs nothing",
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise DeviceError(
                f"{name} is on meta",
                expected="a module with data, on the CPU or on a CUDA card",
                do="Move it by to_empty(device=...) and load its weights, or pass the function that makes it to "
                "memplan.plan, which then allocates nothing",
            )


def _specs_to_tensors(value: Any) -> Any:
    """Replace each `Spec` in nested arguments by a tensor of its shape and dtype."""
    return _torch.tree_map(lambda leaf: leaf.make() if isinstance(leaf, Spec) else leaf, value)
