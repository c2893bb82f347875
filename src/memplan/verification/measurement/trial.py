"""Run a step repeatedly, on copies of the user's module and inputs."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._interrupts import safe_point
from memplan.errors import InputError
from memplan.planning.capture.loss_module import default_loss
from memplan.rewriting.update_early import Early, update_early
from memplan.trace.spec import Spec
from memplan.trace.structure import take_apart
from memplan.verification.measurement.peak_and_time import Meter, storage_bytes, timed
from memplan.verification.measurement.state_copies import ModuleCopy, copy_tensors, drawing_random_numbers

Optimizer = Callable[[Any], Any]


@dataclass(frozen=True)
class Work:
    """A training step: inputs, loss and optimizer."""

    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    loss: Callable[..., Any] | None = None
    optimizer: Optimizer | None = None
    autocast: torch.dtype | None = None
    micro_batches: int = 1
    """Number of backward passes before an update; their gradients add up."""

    @property
    def update(self) -> Optimizer:
        """The optimizer's callable; by default SGD with momentum."""
        return default_optimizer if self.optimizer is None else self.optimizer

    def under_autocast(self, device: str) -> AbstractContextManager[Any]:
        """Return the autocast context of model and loss."""
        return nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast)


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum. With it, a lost or doubled gradient changes the parameters after the next step."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Trial:
    """Run a callable on copies of a module's state.

    Args:
        name: name of its ranges in a `Meter`.
        call: called with the inputs.
        module: its parameters and buffers are copied; None if the callable has none.
        work: the step.
        in_backward: whether updates happen in the backward pass.
        updates: False for a trial that never updates: its parameters share the module's memory.
        float64: all floating-point tensors are in float64, without autocast.
        kernels: context of both passes that chooses kernels.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], module: nn.Module | None, work: Work, *, in_backward: bool = False,
        updates: bool = True, float64: bool = False,
        kernels: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.name, self.call, self.in_backward, self._float64 = name, call, in_backward, float64
        self._kernels = kernels
        self.work = replace(work, autocast=None) if float64 else work
        self._module = module
        self._copy = None if module is None else ModuleCopy(module, shared=not updates, float64=float64)
        self._device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self.device = self._device.type
        """Type of the device."""
        self.output: Any = None
        """Of the last step, while it is compared."""
        self.run_seconds: list[float] = []
        """Seconds of each step that ran so far, as `seconds` returns them, but with Python's garbage collector on, and
        where a meter counts, with its profiler. Those of early updates include copies of gradients."""
        self.other_resident = 0
        """Resident bytes of tensors that the trial does not know, such as a plan's constants."""
        self._arguments: tuple[Any, Any, Any] = ((), {}, ())
        """Inputs, keywords and targets of the next step."""
        self._tensors: list[torch.Tensor] = []
        """Tensors in the arguments."""
        self.update: Any = None
        """The optimizer; None without parameters or updates."""
        self._initial_state: dict[Any, Any] = {}
        """The optimizer's state before its first update, which some, like Adagrad, have."""
        self._initial_tensors: list[weakref.ref[torch.Tensor]] = []
        """The tensors of that state in the optimizer itself."""
        self._early: Early | None = None
        """None if updates do not happen in the backward pass."""
        self._record = _GradientRecord()
        """Gradients that early updates free."""
        # the optimizer, on the copied parameters
        parameters = list(self.parameters.values())
        if parameters and updates:
            with self.running():  # the callable may read names of the module's parameters
                optimizer = work.update(parameters)
            _check_parameters(optimizer, parameters)
            self.update, self._initial_state = optimizer, _copy_state(getattr(optimizer, "state", {}))
            self._note_initial_tensors()
            if in_backward:
                for name, parameter in self.parameters.items():
                    self._record.observe(name, parameter)  # before the update, whose hook runs after this one
                self._early = update_early(optimizer)
                weakref.finalize(self, self._early.undo)  # removes its global hooks

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name."""
        return {} if self._copy is None else self._copy.parameters

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by name."""
        return {} if self._copy is None else self._copy.buffers

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Gradients of all parameters, and of the inputs that require one. Those that early updates have freed are
        there after `record_gradients`."""
        recorded = self._record.gradients
        named = {name: recorded.get(name, p.grad) for name, p in self.parameters.items() if p.requires_grad}
        return named | {f"input {n}": tensor.grad for n, tensor in enumerate(self._tensors) if tensor.requires_grad}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors for each parameter by name, such as ``exp_avg of head.weight``."""
        state = getattr(self.update, "state", {})
        return {
            f"{f'{key}.{part}' if part else key} of {name}": inner
            for name, parameter in self.parameters.items()
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
            for part, inner in _torch.inner_tensors(value).items()
        }

    @property
    def resident(self) -> int:
        """Bytes of parameters, buffers and inputs, with `other_resident`."""
        tensors = [*self.parameters.values(), *self.buffers.values(), *self._tensors]
        return self.other_resident + storage_bytes(tensors, self.device)

    @property
    def initial_state_bytes(self) -> int:
        """Bytes of the optimizer's tensors from before its first update: a `Meter` of the steps does not see them, nor
        are they `resident`."""
        tensors = [tensor for tensor in (reference() for reference in self._initial_tensors) if tensor is not None]
        return storage_bytes(tensors, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run with the copies, and with grad mode on regardless of the caller's."""
        with (
            drawing_random_numbers() if self._copy is None else self._copy.in_place(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

    def prepare(self) -> None:
        """Copy the inputs for the next step, as a model may write into them. Those described by a `Spec` are made."""
        self.output = None
        arguments = (self.work.inputs, dict(self.work.kwargs), self.work.targets)
        arguments = _torch.tree_map(lambda leaf: leaf.make() if isinstance(leaf, Spec) else leaf, arguments)
        tensors, structure = take_apart(arguments)
        copies = copy_tensors(tensors)
        self._tensors = [_to_float64(tensor) for tensor in copies] if self._float64 else copies
        self._arguments = structure.rebuild(self._tensors)

    def gradients_of_step(self, meter: Meter | None = None) -> None:
        """Run forward and backward for each micro-batch, and store the output of the last."""
        safe_point()
        with self.running(), _counting_bytes(meter, self.name), self._kernels():
            begin = time.perf_counter()
            for parameter in self.parameters.values():
                parameter.grad = None
            for _ in range(self.work.micro_batches):
                self.output = None  # freed before the next is computed
                self.output = self._forward_backward()
            self.run_seconds.append(time.perf_counter() - begin)

    def record_gradients(self) -> None:
        """Copy each gradient of the next step before its early update, until `release`. The memory for the copies is
        allocated here: it is not part of the step's peak."""
        if self.in_backward:
            self._record.allocate(self.parameters)

    def set_gradients_from(self, other: Trial) -> None:
        """Copy the gradients of another trial's parameters into this trial's, to update by the same."""
        gradients = other.gradients
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            if parameter.grad is None or gradient is None or parameter.grad.layout != gradient.layout:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)

    def copy_state_from(self, other: Trial) -> None:
        """Copy the values of another trial's parameters and buffers into this trial's."""
        self._copy_state(other.parameters, other.buffers)

    def copy_numbers_from(self, other: Trial) -> None:
        """Copy attributes of another trial's module that are numbers: its forward may count calls."""
        if self._copy is not None and other._copy is not None:
            self._copy.copy_numbers_from(other._copy)

    def _copy_state(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Copy values into this trial's parameters and buffers, by name."""
        with torch.no_grad():
            for tensors, sources in ((self.parameters, parameters), (self.buffers, buffers)):
                for name, tensor in tensors.items():
                    tensor.copy_(sources[name])

    def restart_from(self, other: Trial) -> None:
        """Copy another trial's parameters and buffers, and set everything else back to where this trial began: the
        optimizer's state, and all other attributes of the module."""
        self.copy_state_from(other)
        self._reset()

    def restart(self) -> None:
        """Set everything back to where this trial began; parameters and buffers are those of the module again."""
        if self._module is not None:
            self._copy_state(dict(self._module.named_parameters()), dict(self._module.named_buffers()))
        self._reset()

    def _reset(self) -> None:
        """Set attributes of the module and the optimizer's state back to where this trial began."""
        if self._copy is not None:
            self._copy.reset_attributes()
        if self._early is not None:
            self._early.forget()
        state = getattr(self.update, "state", {})
        state.clear()
        state.update(_copy_state(self._initial_state))
        self._note_initial_tensors()

    def _note_initial_tensors(self) -> None:
        """Refer to the tensors of the optimizer's state, before its first update."""
        tensors, _ = take_apart([*getattr(self.update, "state", {}).values()])
        plain = (part for tensor in tensors for part in _torch.inner_tensors(tensor).values())
        self._initial_tensors = [weakref.ref(tensor) for tensor in plain]

    def update_step(self, meter: Meter | None = None) -> None:
        """Run the optimizer's update, which a meter counts only if the optimizer is the user's."""
        if self.update is not None:  # with updates in the backward pass, this ends the step
            safe_point()
            meter = meter if self.work.optimizer is not None else None
            begin = time.perf_counter()
            with self.running(), _counting_bytes(meter, self.name):
                self.update.step()
            if self.work.optimizer is not None and self.run_seconds:
                self.run_seconds[-1] += time.perf_counter() - begin

    def release(self) -> None:
        """Free output, inputs and gradients: everything that the next step does not need."""
        self.output = None
        self._arguments, self._tensors = ((), {}, ()), []
        self._record.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def seconds(self) -> float:
        """Time one step, with the update where the optimizer is the user's."""
        self.prepare()
        parameters = list(self.parameters.values())

        def step() -> None:
            """Run the step that is timed."""
            for parameter in parameters:
                parameter.grad = None
            for _ in range(self.work.micro_batches):
                self._forward_backward()
            if self.update is not None and self.work.optimizer is not None:
                self.update.step()

        safe_point()
        with self.running():
            seconds = timed(step, str(self._device))
        self.release()
        return seconds

    def _forward_backward(self) -> Any:
        """Run forward, loss and backward once, and return the output, detached."""
        inputs, kwargs, targets = self._arguments
        with self.work.under_autocast(self.device):
            output = self.call(*inputs, **kwargs)
            loss = default_loss(output) if self.work.loss is None else self.work.loss(output, *targets)
        loss.backward()
        tensors, structure = take_apart(output)
        return structure.rebuild([tensor.detach() for tensor in tensors])


class _GradientRecord:
    """Copies of gradients, each from the moment when it is complete."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        """Copied gradients by name of the parameter."""
        self._memory: dict[str, torch.Tensor] = {}
        """By name, memory for a gradient that is not there yet."""

    def observe(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the gradients of a parameter while there is memory for them."""
        memory, gradients = self._memory, self.gradients

        def copy_gradient(parameter: torch.Tensor) -> None:
            """The hook, which refers to no trial: the garbage collector does not see hooks of tensors."""
            place, gradient = memory.pop(name, None), parameter.grad
            if place is None or gradient is None:
                return
            alike = (gradient.layout, gradient.dtype) == (place.layout, place.dtype)
            gradients[name] = place.copy_(gradient) if alike else gradient.clone()

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(copy_gradient)

    def allocate(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Allocate memory for a gradient of each parameter that is trained."""
        self.clear()
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._memory.update({name: torch.empty_like(parameter.detach()) for name, parameter in trained.items()})

    def clear(self) -> None:
        """Free the copies."""
        self._memory.clear()
        self.gradients.clear()


def _copy_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy an optimizer's state, by the same parameters."""
    return {parameter: copy.deepcopy(values) for parameter, values in state.items()}


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a floating-point tensor to a leaf in float64; others are returned unchanged."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(torch.float64).requires_grad_(tensor.requires_grad)


def _counting_bytes(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    """Return a context in which the meter, if any, counts allocations for the trial of this name."""
    return nullcontext() if meter is None else meter.counting(name)


def _check_parameters(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Raise InputError if an optimizer would update other parameters, such as the user's."""
    allowed_ids = {id(parameter) for parameter in parameters}
    groups = getattr(optimizer, "param_groups", [])
    if any(id(parameter) not in allowed_ids for group in groups for parameter in group["params"]):
        raise InputError(
            "the optimizer took other parameters than it was given",
            expected="a callable that makes an optimizer of the parameters that it is called with",
            do="Make it use its argument, as in lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
