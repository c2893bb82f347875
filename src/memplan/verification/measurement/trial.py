"""Run one side of a comparison: a step, repeatedly, on copies of the user's module and inputs."""

from __future__ import annotations

import copy
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
from memplan.verification.measurement.state_copies import ModuleCopy, copies, drawing

Optimizer = Callable[[Any], Any]


@dataclass(frozen=True)
class Work:
    """The step that both sides run."""

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
        """Optimizer; SGD with momentum where none is given."""
        return default_optimizer if self.optimizer is None else self.optimizer

    def around(self, device: str) -> AbstractContextManager[Any]:
        """Return the autocast around model and loss."""
        return nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast)


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum: a lost or doubled gradient shows in the next step at the latest."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Trial:
    """Run a callable on copies of a module's state.

    Args:
        name: the name that a meter counts it by.
        call: called with the inputs.
        module: copies of its parameters and buffers are used; None where the callable has none.
        work: the step.
        in_backward: whether updates happen in the backward pass.
        updates: False for a trial that never updates: its parameters use the module's memory.
        wide: everything of floating point is in float64, without autocast.
        kernels: entered around both passes: which kernels compute.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], module: nn.Module | None, work: Work, *, in_backward: bool = False,
        updates: bool = True, wide: bool = False,
        kernels: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.name, self.call, self.in_backward, self._wide = name, call, in_backward, wide
        self._kernels = kernels
        self.work = replace(work, autocast=None) if wide else work
        self._copy = None if module is None else ModuleCopy(module, shared=not updates, wide=wide)
        self._place = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self.device = self._place.type
        self.output: Any = None
        self.beside = 0
        """Resident bytes of tensors that the trial does not know."""
        self._given: tuple[Any, Any, Any] = ((), {}, ())
        self._tensors: list[torch.Tensor] = []
        """Tensors of the inputs, keywords and targets."""
        self.update: Any = None
        self._begun: dict[Any, Any] = {}
        """State of the optimizer before its first update: Adagrad makes it at once."""
        self._early: Early | None = None
        parameters = list(self.parameters.values())
        if parameters and updates:
            with self.running():  # a callable may look at the module for names or groups
                made = work.update(parameters)
            _check_own(made, parameters)
            self.update, self._begun = made, _copied(getattr(made, "state", {}))
            if in_backward:
                self._early = update_early(made)
                weakref.finalize(self, self._early.undo)  # its global hooks go with it

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
        """Gradients of all parameters, and of the inputs that require one."""
        named = {name: p.grad for name, p in self.parameters.items() if p.requires_grad}
        return named | {f"input {n}": one.grad for n, one in enumerate(self._tensors) if one.requires_grad}

    @property
    def resident(self) -> int:
        """Bytes of parameters, buffers, inputs and what is `beside` them."""
        tensors = [*self.parameters.values(), *self.buffers.values(), *self._tensors]
        return self.beside + storage_bytes(tensors, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put the copies in place, with gradients on whatever the caller has switched off."""
        with (
            drawing() if self._copy is None else self._copy.in_place(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

    def prepare(self) -> None:
        """Copy the inputs anew, as a model may write into them."""
        self.output = None
        given = (self.work.inputs, dict(self.work.kwargs), self.work.targets)
        tensors, structure = take_apart(_torch.tree_map(_made, given))
        self._tensors = [_widened(one) for one in copies(tensors)] if self._wide else copies(tensors)
        self._given = structure.rebuild(self._tensors)

    def gradients_of_step(self, meter: Meter | None = None) -> None:
        """Run forward and backward for each micro-batch; keep the last one's output."""
        safe_point()
        with self.running(), _counted(meter, self.name), self._kernels():
            for parameter in self._leaves():
                parameter.grad = None
            for _ in range(self.work.micro_batches):
                self.output = None
                self.output = self._forward_backward()

    def begin_as(self, other: Trial) -> None:
        """Copy the other side's parameters and buffers: the next step begins with its values."""
        with torch.no_grad():
            for mine, theirs in ((self.parameters, other.parameters), (self.buffers, other.buffers)):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name])

    def restart_as(self, other: Trial) -> None:
        """Begin as the other side, and forget the steps so far: the optimizer has updated nothing."""
        self.begin_as(other)
        if self._early is not None:
            self._early.forget()
        state = getattr(self.update, "state", {})
        state.clear()
        state.update(_copied(self._begun))

    def update_step(self, meter: Meter | None = None) -> None:
        """Run the optimizer's update, which a meter counts only where the optimizer is the user's."""
        if self.update is not None:  # which closes the step where it updates in the backward pass
            safe_point()
            with self.running(), _counted(meter if self.work.optimizer is not None else None, self.name):
                self.update.step()

    def rest(self) -> None:
        """Free all that the next step does not need, while the other side runs."""
        self.output = None
        self._given, self._tensors = ((), {}, ()), []
        for parameter in self._leaves():
            parameter.grad = None

    def seconds(self) -> float:
        """Time one step, with the update where the optimizer is the user's."""
        self.prepare()
        leaves = self._leaves()

        def step() -> None:
            for parameter in leaves:
                parameter.grad = None
            for _ in range(self.work.micro_batches):
                self._forward_backward()
            if self.update is not None and self.work.optimizer is not None:
                self.update.step()

        safe_point()
        with self.running():
            taken = timed(step, str(self._place))
        self.rest()
        return taken

    def _leaves(self) -> list[nn.Parameter]:
        return list(self.parameters.values())

    def _forward_backward(self) -> Any:
        inputs, kwargs, targets = self._given
        with self.work.around(self.device):
            output = self.call(*inputs, **kwargs)
            loss = default_loss(output) if self.work.loss is None else self.work.loss(output, *targets)
        loss.backward()
        tensors, structure = take_apart(output)
        return structure.rebuild([tensor.detach() for tensor in tensors])


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy an optimizer's state; parameters stay the same."""
    return {parameter: copy.deepcopy(held) for parameter, held in state.items()}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(torch.float64).requires_grad_(tensor.requires_grad)


def _made(leaf: Any) -> Any:
    return leaf.make() if isinstance(leaf, Spec) else leaf


def _counted(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if meter is None else meter.counting(name)


def _check_own(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Raise InputError where an optimizer would update other parameters: the user's."""
    own = {id(parameter) for parameter in parameters}
    groups = getattr(optimizer, "param_groups", [])
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise InputError(
            "the optimizer took other parameters than it was given",
            expected="a callable that makes an optimizer of the parameters that it is called with",
            do="Make it use its argument, as in lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
