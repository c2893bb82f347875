"""How a recorded step uses `DistributedDataParallel` and `fully_shard`.

Seen in torch 2.13. Private names: ``torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState`` with
``_register_pre_backward_hook``, ``_fsdp_param_groups`` and ``_modules``, and ``collect_grad_tensors`` beside it.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memplan._torch.distributed import reductions_reported
from memplan._torch.patches import patched


@dataclass
class DataParallelUse:
    """How the steps used a `DistributedDataParallel` module. Parameters are identified by their ``id``."""

    where: str | None
    """The user's line that constructed the module."""
    searches: bool = False
    """Whether the module searches each pass for unused parameters (``find_unused_parameters=True``)."""
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    """Bytes of each parameter that requires a gradient."""
    used: list[set[int]] = field(default_factory=list[set[int]])
    """The parameters that got a gradient after each forward pass."""
    drew: bool = False
    """Whether the wrapped module drew from Python's or NumPy's random stream, so that later passes may use other
    parameters."""
    reductions: dict[int, int] = field(default_factory=dict[int, int])
    """Number of reductions of each gradient since the last update, or since the gradient was zeroed."""
    updates: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    """``reductions`` before each update."""
    by_hand: dict[str | None, set[int]] = field(default_factory=dict[str | None, set[int]])
    """Line of code -> parameters whose gradients were reduced there, after the module had reduced them."""


@contextlib.contextmanager
def data_parallel_observed(locate: Callable[[], str | None]) -> Iterator[list[DataParallelUse]]:
    """Yield a list to which each `DistributedDataParallel` constructed in this context is added. ``locate`` returns the
    user's current line."""
    uses: list[DataParallelUse] = []
    of_module: dict[int, DataParallelUse] = {}
    parameters: dict[int, torch.Tensor] = {}
    gradients: dict[int, Any] = {}
    """id() of a parameter -> weak reference to its last reduced gradient. Another gradient now: it was zeroed since."""
    construct, forward = DistributedDataParallel.__init__, DistributedDataParallel.forward
    all_reduce, optimizer_zero, module_zero = dist.all_reduce, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    def construct_observed(self: Any, *args: Any, **kwargs: Any) -> None:
        """Construct a `DistributedDataParallel` module, and observe the gradients of its parameters."""
        construct(self, *args, **kwargs)
        use = DataParallelUse(locate(), bool(self.find_unused_parameters) and not self.static_graph)
        uses.append(use)
        of_module[id(self)] = use
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameters[id(parameter)] = parameter
                use.sizes[id(parameter)] = parameter.numel() * parameter.element_size()
                parameter.register_hook(partial(_note_gradient, use, id(parameter)))

    def run_observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module's forward pass. A new set of parameters with gradients begins, unless the last one is empty
        still."""
        use = of_module.get(id(self))
        if use is None:
            return forward(self, *args, **kwargs)
        if torch.is_grad_enabled() and (not use.used or use.used[-1]):
            use.used.append(set())
        before = _random_states()
        result = forward(self, *args, **kwargs)
        use.drew |= before != _random_states()
        return result

    def note_reduction(bucket: Any) -> None:
        """Count the reductions of the gradients in a bucket that a module reduces."""
        for parameter in bucket.parameters():
            key = id(parameter)
            for use in (use for use in uses if key in use.sizes):
                last = gradients.get(key)
                is_new = last is None or last() is not parameter.grad
                use.reductions[key] = 1 if is_new else use.reductions.get(key, 0) + 1
            gradients[key] = None if parameter.grad is None else weakref.ref(parameter.grad)

    def all_reduce_observed(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """Replace `torch.distributed.all_reduce`: note gradients that the user reduces a second time."""
        if group is None or dist.get_process_group_ranks(group) == list(range(dist.get_world_size())):
            for use in uses:
                keys = {key for key in use.sizes if _is_gradient_of(tensor, parameters[key])}
                if keys and all(use.reductions.get(key) for key in keys):
                    use.by_hand.setdefault(locate(), set()).update(keys)
        return all_reduce(tensor, op=op, group=group, async_op=async_op)

    def resets_counts(zero_grad: Callable[..., Any], parameters_of: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return a ``zero_grad`` that also resets the counts of reductions of the zeroed gradients."""

        def zero_and_reset(self: Any, *args: Any, **kwargs: Any) -> Any:
            for parameter in parameters_of(self):
                for use in uses:
                    use.reductions.pop(id(parameter), None)
            return zero_grad(self, *args, **kwargs)

        return zero_and_reset

    def note_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the counts of reductions before an optimizer's update, and reset them."""
        keys = {id(parameter) for parameter in _of_optimizer(optimizer)}
        for use in uses:
            counts = {key: use.reductions.pop(key) for key in keys & use.reductions.keys()}
            if counts:
                use.updates.append(counts)

    handle = register_optimizer_step_pre_hook(note_update)
    try:
        with (
            patched(DistributedDataParallel, __init__=construct_observed, forward=run_observed),
            patched(dist, all_reduce=all_reduce_observed),
            patched(torch.optim.Optimizer, zero_grad=resets_counts(optimizer_zero, _of_optimizer)),
            patched(nn.Module, zero_grad=resets_counts(module_zero, nn.Module.parameters)),
            reductions_reported(note_reduction),
        ):
            yield uses
    finally:
        handle.remove()


def _note_gradient(use: DataParallelUse, key: int, gradient: torch.Tensor) -> None:
    """Note that the parameter with this ``id`` got a gradient, as a hook of it."""
    if use.used:
        use.used[-1].add(key)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_gradient_of(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a tensor is the gradient of a parameter, or a view of all of it."""
    gradient = parameter.grad
    if gradient is None or tensor is gradient:
        return gradient is not None
    same_storage = tensor.untyped_storage()._cdata == gradient.untyped_storage()._cdata
    same_begin = tensor.storage_offset() == gradient.storage_offset()
    return same_storage and same_begin and tensor.numel() == gradient.numel()


def _random_states() -> tuple[Any, ...]:
    """Return the states of Python's random numbers, and of NumPy's if it was imported, to be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), ()
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), (state["pos"], bytes(state["key"]))


@dataclass
class ChangedOutput:
    """A view that a module wrapped by `fully_shard` returned, whose weights were freed after its forward pass."""

    modules: tuple[nn.Module, ...]
    tensor: torch.Tensor
    made_by: Any
    """``tensor.grad_fn`` when the module returned the tensor."""

    @property
    def is_changed(self) -> bool:
        """Return whether an op has changed the tensor in place, which replaces its ``grad_fn``."""
        return self.tensor.grad_fn is not self.made_by


@contextlib.contextmanager
def sharded_views_observed() -> Iterator[list[ChangedOutput]]:
    """Yield a list to which the views that modules wrapped by `fully_shard` return are added, and which keeps them
    alive."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    views: list[ChangedOutput] = []
    register = _fsdp_state.FSDPState._register_pre_backward_hook
    tensors_of: Any = vars(_fsdp_state)["collect_grad_tensors"]

    def note_and_register(self: Any, output: Any) -> Any:
        """Note the views among a sharded module's outputs, before FSDP registers its backward hooks for them."""
        if torch.is_grad_enabled() and any(group.is_sharded for group in self._fsdp_param_groups):
            views_in_output = [tensor for tensor in tensors_of(output) if tensor._base is not None]
            views.extend(ChangedOutput(tuple(self._modules), view, view.grad_fn) for view in views_in_output)
        return register(self, output)

    with patched(_fsdp_state.FSDPState, _register_pre_backward_hook=note_and_register):
        yield views
