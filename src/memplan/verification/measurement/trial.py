"""One side of a comparison: a step that runs again and again on copies of the user's module and inputs."""

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
from memplan.errors import InputError
from memplan.planning.capture.loss_module import default_loss
from memplan.rewriting.update_early import Early, update_early
from memplan.trace.spec import Spec
from memplan.trace.structure import take_apart
from memplan.verification.measurement.peak_and_time import Meter, storage_bytes, timed
from memplan.verification.measurement.state_copies import ModuleCopy, copies

Optimizer = Callable[[Any], Any]


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    loss: Callable[..., Any] | None = None
    optimizer: Optimizer | None = None
    autocast: torch.dtype | None = None
    micro_batches: int = 1
    """Backward passes before an update, each added to the gradients of those before."""

    @property
    def update(self) -> Optimizer:
        """The optimizer, SGD with momentum where none is given."""
        return default_optimizer if self.optimizer is None else self.optimizer

    def around(self, device: str) -> AbstractContextManager[Any]:
        """The autocast around model and loss."""
        return nullcontext() if self.autocast is None else torch.autocast(device, dtype=self.autocast)


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum: a lost or doubled gradient shows in the next step at the latest."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Trial:
    """A callable, and the module whose state it runs on.

    Args:
        name: under which a meter counts it.
        call: what is called with the inputs.
        module: of whose parameters and buffers copies are used; None where the callable has none.
        work: what is done.
        in_backward: whether the updates happen in the backward pass.
        updates: False for one that never updates: its parameters take no memory then.
        wide: whatever is of floating point is in float64, without autocast.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], module: nn.Module | None, work: Work, *, in_backward: bool = False,
        updates: bool = True, wide: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.call, self.in_backward, self._wide = name, call, in_backward, wide
        self.work = replace(work, autocast=None) if wide else work
        self._copy = None if module is None else ModuleCopy(module, shared=not updates, wide=wide)
        self._place = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self.device = self._place.type
        self.output: Any = None
        self.beside = 0
        """Bytes that are there all the time, beyond what it can see itself."""
        self._given: tuple[Any, Any, Any] = ((), {}, ())
        self._tensors: list[torch.Tensor] = []
        """Those of the inputs, keywords and targets."""
        self.update: Any = None
        self._begun: dict[Any, Any] = {}
        """What the optimizer holds before its first update: Adagrad makes its state at once."""
        self._early: Early | None = None
        parameters = list(self.parameters.values())
        if parameters and updates:
            with self.running():  # a callable may look at the module for names or groups
                made = work.update(parameters)
            _check_own(made, parameters)
            self.update, self._begun = made, _copied(getattr(made, "state", {}))
            if in_backward:
                self._early = update_early(made)
                weakref.finalize(self, self._early.undo)  # what it watches for is not watched any longer

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters, by name."""
        return {} if self._copy is None else self._copy.parameters

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Its buffers, by name."""
        return {} if self._copy is None else self._copy.buffers

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Of all parameters, and of the inputs that need one."""
        named = {name: p.grad for name, p in self.parameters.items() if p.requires_grad}
        return named | {f"input {n}": one.grad for n, one in enumerate(self._tensors) if one.requires_grad}

    @property
    def resident(self) -> int:
        """Bytes of its parameters, buffers and inputs, and of what is beside them."""
        tensors = [*self.parameters.values(), *self.buffers.values(), *self._tensors]
        return self.beside + storage_bytes(tensors, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The copies are in place, and gradients are on, whatever the caller has switched off."""
        with (
            nullcontext() if self._copy is None else self._copy.in_place(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

    def prepare(self) -> None:
        """New copies of the inputs, as a model may write into them."""
        self.output = None
        given = (self.work.inputs, dict(self.work.kwargs), self.work.targets)
        tensors, structure = take_apart(_torch.tree_map(_made, given))
        self._tensors = [_widened(one) for one in copies(tensors)] if self._wide else copies(tensors)
        self._given = structure.rebuild(self._tensors)

    def gradients_of_step(self, meter: Meter | None = None) -> None:
        """Forward and backward, for each micro-batch; the output of the last one is kept."""
        with self.running(), _counted(meter, self.name):
            for parameter in self._leaves():
                parameter.grad = None
            for _ in range(self.work.micro_batches):
                self.output = None
                self.output = self._forward_backward()

    def begin_as(self, other: Trial) -> None:
        """Take over the other side's parameters and buffers: the next step begins where its does."""
        with torch.no_grad():
            for mine, theirs in ((self.parameters, other.parameters), (self.buffers, other.buffers)):
                for name, tensor in mine.items():
                    tensor.copy_(theirs[name])

    def restart_as(self, other: Trial) -> None:
        """As `begin_as`, after steps that do not count or did not end: with an optimizer that has updated nothing."""
        self.begin_as(other)
        if self._early is not None:
            self._early.forget()
        state = getattr(self.update, "state", {})
        state.clear()
        state.update(_copied(self._begun))

    def update_step(self, meter: Meter | None = None) -> None:
        """The optimizer's update, which a meter counts only where the optimizer is the user's."""
        if self.update is not None:  # which closes the step where it updates in the backward pass
            with self.running(), _counted(meter if self.work.optimizer is not None else None, self.name):
                self.update.step()

    def rest(self) -> None:
        """Hold no more than the next step needs, while the other side runs."""
        self.output = None
        self._given, self._tensors = ((), {}, ()), []
        for parameter in self._leaves():
            parameter.grad = None

    def seconds(self) -> float:
        """Of one step, with the update where the optimizer is the user's."""
        self.prepare()
        leaves = self._leaves()

        def step() -> None:
            for parameter in leaves:
                parameter.grad = None
            for _ in range(self.work.micro_batches):
                self._forward_backward()
            if self.update is not None and self.work.optimizer is not None:
                self.update.step()

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
    """By parameter, which stays the same, what an optimizer holds."""
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
    """Raises InputError where an optimizer would update other parameters: the user's."""
    own = {id(parameter) for parameter in parameters}
    groups = getattr(optimizer, "param_groups", [])
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise InputError(
            "the optimizer took other parameters than it was given",
            expected="a callable that makes an optimizer of the parameters that it is called with",
            do="Make it use its argument, as in lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)",
        )
