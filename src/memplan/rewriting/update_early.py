"""An optimizer that updates each parameter in the backward pass, as soon as its gradient is complete, and frees it."""

from __future__ import annotations

import inspect
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan import _torch
from memplan.errors import UsageError

_ACCUMULATED = (
    "an early update needs one backward pass for each optimizer.step(), from gradients that are not there yet"
)


def update_early(optimizer: torch.optim.Optimizer) -> Early:
    """Make an optimizer update each parameter as soon as its gradient is complete.

    The training loop stays the same: ``step()`` has no gradients and only runs its hooks; ``zero_grad()`` has nothing
    to do. Learning rate schedules and ``state_dict`` work as before. Gradients are freed when the backward pass ends,
    so the loop cannot clip or scale them, nor discard unwanted gradients, such as a discriminator's when a generator is
    trained through it.

    Args:
        optimizer: any optimizer that updates each parameter from its own gradient and state alone.

    Raises:
        UsageError: the optimizer needs a closure (LBFGS), or there are several processes (DDP). Later, in the loop:
            gradients are accumulated, clipped, scaled by a GradScaler, discarded by ``zero_grad()``, computed for
            parameters of other optimizers as well, or left to another optimizer's ``step()``; or the optimizer's
            options, its parameters or their gradients are changed between the backward pass and ``step()``.

    Example:
        >>> early = update_early(optimizer)
        >>> step(images, labels).backward()  # parameters are updated here
        >>> optimizer.step()
    """
    return Early(optimizer)


class Early:
    """An optimizer that updates parameters in the backward pass; see `update_early`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Install the hooks that update each parameter as soon as its gradient is complete. Raises UsageError if the
        optimizer needs a closure, or several processes run."""
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} updating early",
                expected="an optimizer that updates each parameter from its gradient alone, without a closure",
                do="Take another optimizer, or leave early out",
            )
        _refuse_several_processes()
        self._optimizer = optimizer
        self._update = _torch.bare_step(optimizer)
        """The optimizer's step without its hooks."""
        self._groups: dict[int, dict[str, Any]] = {}
        """The optimizer's group of each parameter, by id of the parameter."""
        self._listed: tuple[Any, int] = (None, 0)
        """The list of the optimizer's groups, and its length, of which `_groups` was made."""
        self._updated: dict[int, int] = {}
        """Version after the update, by id of each parameter that was updated since the last ``step()``."""
        self._before_pass: dict[int, int] = {}
        """Copy of `_updated` from the start of the last backward pass."""
        self._used_options: dict[int, dict[str, Any]] = {}
        """Options of the updates, by id of the parameter group."""
        self._ids = frozenset(map(id, _parameters(optimizer)))
        """id() of each of the optimizer's parameters."""
        self._handles = [optimizer.register_step_pre_hook(self._check_step_begin)]
        """Of the hooks, to remove them."""
        for parameter in _parameters(optimizer):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._make_gradient_check(parameter)))
                self._handles.append(parameter.register_post_accumulate_grad_hook(_weak_hook(self._apply_update)))
        self._zero_grad, self._patches = optimizer.zero_grad, ExitStack()
        """The optimizer's own method, and the patch that replaces it."""
        self._patches.enter_context(_torch.patched(optimizer, zero_grad=self._check_and_zero_grad))
        _observer.add(self)
        weakref.finalize(self, _observer.stop_if_unused)

    def undo(self) -> None:
        """Make the optimizer update in ``step()`` again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.close()
        _observer.discard(self)

    def forget(self) -> None:
        """Discard the updates of a backward pass that was interrupted, or not followed by ``step()``."""
        self._updated.clear()
        self._used_options.clear()

    def begin_pass(self) -> None:
        """Save the set of updated parameters before a backward pass, to restore it if the pass raises."""
        self._before_pass = dict(self._updated)

    def discard_pass(self, error: BaseException) -> None:
        """Restore the set of updated parameters after a backward pass that raised ``error``, and add a note to the
        exception if the pass updated some."""
        updated_in_pass = len(self._updated) - len(self._before_pass)
        self._updated = dict(self._before_pass)
        if not self._updated:
            self._used_options.clear()
        if updated_in_pass > 0:
            error.add_note(
                f"memplan: {updated_in_pass} of {len(_parameters(self._optimizer))} parameters had been updated when "
                f"this was raised, and stay so: {self.name} updates early"
            )

    def check_zeroing(self, module: nn.Module) -> None:
        """Raise UsageError for ``zero_grad()`` of a module between the updates of its parameters and ``step()``."""
        if self._updated and any(id(parameter) in self._updated for parameter in module.parameters()):
            raise self._discarded_gradients_error("module.zero_grad()")

    def has_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is updated early."""
        return id(parameter) in self._ids

    def check_backward(self, leaves: list[torch.Tensor]) -> None:
        """Raise UsageError for a backward pass that may be for another optimizer, before any parameter changes.
        ``leaves``: the tensors that it accumulates gradients in."""
        if not any(map(self.has_parameter, leaves)):
            return
        updated = set(map(id, _parameters(self._optimizer)))
        other = next((leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in updated), None)
        if other is not None:
            raise UsageError(
                f"A backward pass into parameters that {self.name} updates early, and into one of shape "
                f"{tuple(other.shape)} that it does not have",
                expected="gradients that are all meant for this optimizer: in a pass for another one (of a generator "
                "through its discriminator) they would be applied here, and not discarded by zero_grad()",
                do="For such a pass call requires_grad_(False) on the model that is not to learn, or detach() what it "
                "is called with; give what does belong to the step to this optimizer by add_param_group(); or leave "
                "early out",
            )

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError for ``step()`` of another optimizer of the same parameters, whose gradients are freed."""
        if optimizer is not self._optimizer and any(map(self.has_parameter, _parameters(optimizer))):
            raise UsageError(
                f"{type(optimizer).__name__}.step() on parameters that another optimizer updates early, in backward",
                expected=f"step() of the optimizer that does: {self.name}",
                do="Use that one, for learning rate schedules and state_dict, too",
            )

    @property
    def name(self) -> str:
        """Name of the optimizer in messages."""
        return f"{type(self._optimizer).__name__} (fitted.optimizer, where memplan.fit made it)"

    def _make_gradient_check(self, parameter: torch.Tensor) -> Any:
        """Return a hook on a parameter that raises UsageError for a gradient that would add to an earlier gradient."""
        key, weak_parameter = id(parameter), weakref.ref(parameter)

        def check(_: torch.Tensor) -> None:
            """The hook, which autograd calls with the gradient before it is stored."""
            _refuse_several_processes()
            parameter = weak_parameter()
            if parameter is not None and parameter.grad is not None:
                raise UsageError(
                    f"A gradient is held already for a parameter of shape {tuple(parameter.shape)}",
                    expected=_ACCUMULATED,
                    do="Call optimizer.zero_grad(), or leave early out to accumulate gradients",
                )
            if key in self._updated:
                raise UsageError(
                    f"A second backward pass before step() of the optimizer that updates early: {self.name}",
                    expected=_ACCUMULATED,
                    do="Call step() of that very optimizer after each backward pass, or leave early out to accumulate "
                    "gradients",
                )

        return check

    def _apply_update(self, parameter: torch.Tensor) -> None:
        """Run the optimizer's own update with this parameter as the only one of its groups, and free the gradient.
        Raises UsageError if the update changes an option of the group, as every further parameter would."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        if self._listed[0] is not groups or self._listed[1] != len(groups):  # after load_state_dict, add_param_group
            self._groups = {id(member): group for group in groups for member in group["params"]}
            self._listed = (groups, len(groups))
        group = self._groups[id(parameter)]
        parameters = group["params"]
        options = {name: value for name, value in group.items() if name != "params"}
        try:
            optimizer.param_groups, group["params"] = [group], [parameter]
            self._update()
        finally:
            optimizer.param_groups, group["params"] = groups, parameters
        changed = [name for name, value in options.items() if group.get(name) is not value]
        if changed or len(options) + 1 != len(group):
            raise UsageError(
                f"{type(optimizer).__name__} changes its option {(changed or ['(a new one)'])[0]!r} with each update",
                expected="an optimizer that updates each parameter from its gradient and its own state alone",
                do="Take another optimizer, or leave early out",
            )
        self._updated[id(parameter)] = _torch.version_of(parameter)
        self._used_options.setdefault(id(group), {name: _comparable(value) for name, value in options.items()})
        parameter.grad = None

    def _check_step_begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UsageError at the start of ``step()`` if options, parameters or gradients changed since the updates in
        the backward pass: ``step()`` does not update again.

        ``args``, ``kwargs``: the arguments of ``step()``, the optimizer first.
        """
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UsageError(
                "optimizer.step() with a closure",
                expected="step() without one: the parameters were updated in the backward pass",
                do="Leave the closure out, or leave early out",
            )
        updated, used = self._updated, self._used_options
        self._updated, self._used_options = {}, {}
        for group in self._optimizer.param_groups:
            self._check_options(group, used.get(id(group), {}))
            for parameter in group["params"]:
                self._check_unchanged(parameter, updated.get(id(parameter)))

    def _check_options(self, group: dict[str, Any], used: dict[str, Any]) -> None:
        """Raise UsageError if an option of a parameter group changed since the updates, which ran with ``used``."""
        changed = next((name for name, value in used.items() if _comparable(group.get(name)) != value), None)
        if changed is not None:
            raise UsageError(
                f"The option {changed!r} of {self.name} was changed between the backward pass and step()",
                expected="no change there: the parameters were updated in the backward pass, with the old value",
                do="Change it before backward(), or after step(), or leave early out",
            )

    def _check_unchanged(self, parameter: torch.Tensor, version: int | None) -> None:
        """Raise UsageError if a parameter changed, or got a gradient, between its update and ``step()``. ``version``:
        autograd's version after the update; None if it was not updated."""
        if version is None:
            return
        has_gradient = parameter.grad is not None
        if has_gradient or _torch.version_of(parameter) != version:
            happened = "got a gradient" if has_gradient else "was changed"
            raise UsageError(
                f"A parameter of shape {tuple(parameter.shape)} {happened} between the backward pass and step() of "
                f"{self.name}",
                expected="no change there: it was updated in the backward pass",
                do="Change it before backward(), or after step(), or leave early out",
            )

    def _check_and_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's ``zero_grad()``. Raises UsageError between the updates and ``step()``."""
        if self._updated:
            raise self._discarded_gradients_error("zero_grad()")
        self._zero_grad(*args, **kwargs)

    def _discarded_gradients_error(self, call: str) -> UsageError:
        """Return the error for a ``zero_grad()`` between the updates and ``step()``. ``call``: its text."""
        return UsageError(
            f"{call} between a backward pass and step() of {self.name}",
            expected="step() first: the gradients that this would discard were applied in the backward pass",
            do="Leave early out where gradients are discarded. A backward pass that is not for this optimizer must "
            "not reach its parameters: detach(), requires_grad_(False), or backward(inputs=...)",
        )


def _comparable(value: Any) -> Any:
    """Return a comparable copy of an option: identity and version of a tensor, a shallow copy of a list."""
    if isinstance(value, torch.Tensor):
        return id(value), _torch.version_of(value)
    return type(value), list(value) if isinstance(value, (list, tuple)) else value


def _refuse_several_processes() -> None:
    """Raise UsageError in a run of several processes: a gradient would be applied before the all-reduce."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UsageError(
            f"Early updates in one of {distributed.get_world_size()} processes (torch.distributed is initialized)",
            expected="one process: under DDP each would apply its own gradient before those of the others are added",
            do="Leave early out",
        )


def _weak_hook(method: Any) -> Any:
    """Return a hook of a parameter that calls a bound method, but does not keep its object alive. The garbage collector
    does not see hooks of tensors, so a model and its optimizer would leak."""
    weak_method = weakref.WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        alive = weak_method()
        if alive is not None:
            alive(parameter)

    return hook


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _TrainingObserver:
    """Observes clipping, scaling, zeroing and backward passes while any optimizer updates early."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage can be collected at any time
        self._early: weakref.WeakSet[Early] = weakref.WeakSet()
        """Live instances."""
        self._patches = ExitStack()
        """Of torch, while it observes."""
        self._observing = False

    def add(self, early: Early) -> None:
        """Observe for another optimizer; the first optimizer patches torch's functions."""
        with self._lock:
            if not self._observing:
                self._patches.enter_context(_torch.clipping_seen(self._refuse_clipping))
                self._patches.enter_context(_torch.scaling_seen(self._refuse_scaling))
                self._patches.enter_context(_torch.backward_seen(self._begin_backward, self._fail_backward))
                self._patches.enter_context(_torch.module_zeroing_seen(self._check_zeroing))
                self._patches.callback(register_optimizer_step_pre_hook(self._check_step).remove)
                self._observing = True
            self._early.add(early)

    def discard(self, early: Early) -> None:
        """Stop observing for an optimizer."""
        self._early.discard(early)
        self.stop_if_unused()

    def stop_if_unused(self) -> None:
        """Stop observing when no optimizer is left."""
        with self._lock:
            if self._observing and next(iter(self._early), None) is None:
                self._patches.close()
                self._observing = False

    def _refuse_clipping(self, how: str, parameters: list[torch.Tensor]) -> None:
        """Raise UsageError for clipping the gradients of parameters by the function ``how``."""
        if self._has_any(parameters):
            raise UsageError(
                f"{how} on parameters that are updated early",
                expected="no clipping after the backward pass, and none by the global norm: each gradient was applied "
                "and freed before the next was made",
                do="Leave early out, or clip each gradient by itself in a hook on its parameter: "
                "parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))",
            )

    def _refuse_scaling(self, losses: list[torch.Tensor]) -> None:
        """Raise UsageError for a GradScaler that scales losses of parameters that are updated early."""
        if self._has_any(list(_torch.leaves_of(losses))):
            raise UsageError(
                "A GradScaler on parameters that are updated early",
                expected="gradients as they are: whether to skip a step is known only when all of them are there",
                do="Leave early out, or train in bfloat16, which needs no scaling",
            )

    def _begin_backward(self, leaves: list[torch.Tensor]) -> None:
        """Called before each backward pass, with the tensors that it accumulates gradients in."""
        for early in self._early:
            early.check_backward(leaves)
            early.begin_pass()

    def _fail_backward(self, error: BaseException) -> None:
        """Called after a backward pass that raised."""
        for early in self._early:
            early.discard_pass(error)

    def _check_zeroing(self, module: nn.Module) -> None:
        for early in self._early:
            early.check_zeroing(module)

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for early in self._early:
            early.check_step(optimizer)

    def _has_any(self, parameters: list[torch.Tensor]) -> bool:
        return any(early.has_parameter(parameter) for parameter in parameters for early in self._early)


_observer = _TrainingObserver()
