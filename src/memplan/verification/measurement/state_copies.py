"""Run a module with copies of its state: the user's parameters, buffers and random state do not change."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._interrupts import in_place_of, outside_of
from memplan.errors import UsageError
from memplan.planning.capture.side_effects import without_hooks
from memplan.trace.spec import like


class ModuleCopy:
    """Copy the state of a module and its submodules, to run the module with it.

    Parameters are new leaves without hooks and without ``.grad``. What is one tensor, or one storage, in the module is
    one in the copy (tied weights stay tied). Lists, dicts and sets among the attributes are copied, too. Tensors that
    are neither parameters nor buffers are the module's own, as a plan may know them by identity; values that a run
    writes into them are restored. All other attributes are shared.

    Args:
        module: the module.
        shared: parameters are new leaves on the module's own memory: for runs in which nothing is updated.
        wide: tensors of floating point are in float64, each in memory of its own.
    """

    def __init__(self, module: nn.Module, *, shared: bool = False, wide: bool = False) -> None:
        self._copier = copier = _Copier(shared, wide)
        self._module = module
        self._parts = tuple(module.modules())
        states = [_torch.own_state(part) for part in self._parts]
        tensors = [(copier.tensors(s.parameters), copier.tensors(s.buffers)) for s in states]
        self._states = [
            _torch.OwnState(*own, {name: copier.attribute(value) for name, value in s.attributes.items()}, s.hooks)
            for own, s in zip(tensors, states, strict=True)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the module with the copies; what it changes in them is kept for the next time."""
        theirs = [_torch.own_state(part) for part in self._parts]

        def put_back() -> None:
            self._states = [_torch.own_state(part) for part in self._parts]
            self._set(theirs)

        try:
            with drawing(), in_place_of(lambda: self._set(self._states), put_back):
                yield
        finally:
            self._copier.put_back()

    def _set(self, states: list[_torch.OwnState]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            _torch.set_own_state(part, state)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Copies by name, tied ones once."""
        with self.in_place():
            return dict(self._module.named_parameters())

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies by name, those that are one tensor once."""
        with self.in_place():
            return dict(self._module.named_buffers())


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy a call's tensors. What is one tensor, or shares memory, does so in the copies: otherwise they would be
    another kind of call."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        shared = tensor.layout == torch.strided and tensor.numel() > 0
        groups.setdefault(_torch.storage_key(tensor.untyped_storage()) if shared else id(tensor), []).append(tensor)
    made: dict[int, torch.Tensor] = {}
    for group in groups.values():
        alone = {id(tensor): tensor for tensor in group}
        if len(alone) == 1 or len({tensor.dtype for tensor in group}) > 1:
            made.update({key: like(tensor, tensor.device) for key, tensor in alone.items()})
        else:
            made.update(_of_one_memory(alone))
    return [made[id(tensor)] for tensor in tensors]


def _of_one_memory(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copy tensors of one storage, and of the storage only the part that they use."""
    every = list(tensors.values())
    begin = min(one.storage_offset() for one in every)
    end = max(one.storage_offset() + 1 + _reach(one) for one in every)
    with torch.no_grad():
        part = torch.as_strided(every[0], (end - begin,), (1,), begin).clone()
        return {
            key: torch.empty(0, dtype=one.dtype, device=one.device)
            .set_(part.untyped_storage(), one.storage_offset() - begin, one.shape, one.stride())
            .requires_grad_(one.requires_grad)
            for key, one in tensors.items()
        }


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return whole.clone().untyped_storage()


def _reach(tensor: torch.Tensor) -> int:
    """Return the offset of the last element from the first one."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and its submodules afterwards: tracing runs their Python code."""
    parts = [(part, _torch.own_state(part)) for part in module.modules()]
    try:
        yield
    finally:
        for part, state in parts:
            _torch.set_own_state(part, state)


class _Copier:
    """Copy tensors and containers, each once. ``shared``: parameters keep their memory; ``wide``: in float64."""

    def __init__(self, shared: bool, wide: bool) -> None:
        self._in_place, self._wide = shared, wide
        self._made: dict[int, Any] = {}
        self._copied: list[Any] = []
        """Originals: as long as they live, no other object has their ids."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._shared: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Tensors that were not copied, with their version and their values."""

    def tensors(self, named: dict[str, Any]) -> dict[str, Any]:
        """Copy parameters or buffers."""
        return {name: None if tensor is None else self._once(tensor, self._tensor) for name, tensor in named.items()}

    def attribute(self, value: Any) -> Any:
        """Return the copy of any other attribute."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._made or (value.is_leaf and value.requires_grad) or self._wide:
                return self._once(value, self._tensor)
            self._shared[id(value)] = value, _torch.version_of(value), value.detach().clone()
            return value
        if type(value) is list:
            return self._once(value, lambda old: [self.attribute(item) for item in old])
        if type(value) is dict:
            return self._once(value, lambda old: {key: self.attribute(item) for key, item in old.items()})
        if type(value) is tuple:
            return self._once(value, lambda old: tuple(self.attribute(item) for item in old))
        return self._once(value, set) if type(value) is set else value

    def put_back(self) -> None:
        """Restore the values of shared tensors."""
        for key, (tensor, version, values) in self._shared.items():
            if _torch.version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(values)
                self._shared[key] = tensor, _torch.version_of(tensor), values

    def _once(self, value: Any, copied: Callable[[Any], Any]) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = value  # until it is copied, for a value that holds itself
            self._made[id(value)] = copied(value)
            self._copied.append(value)
        return self._made[id(value)]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._in_place and isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), tensor.requires_grad)
        if self._wide and tensor.is_floating_point():
            made = tensor.detach().to(torch.float64)
        elif type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            made = tensor.detach().clone()
        else:
            storage = tensor.untyped_storage()
            key = _torch.storage_key(storage)
            if key not in self._storages:
                self._storages[key] = _copied(storage, tensor.device)
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made.set_(self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


@dataclass(frozen=True)
class RandomState:
    """State of the random streams of this process: torch's, Python's and numpy's; of none where `random_state_kept`
    leaves them alone."""

    streams: dict[str, Any]

    @classmethod
    def now(cls) -> RandomState:
        """Return the present state."""
        if _left_alone.get():
            return cls({})
        streams: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
        if "numpy" in sys.modules:
            import numpy

            streams["numpy"] = numpy.random.get_state()
        if torch.cuda.is_initialized():
            streams["cuda"] = torch.cuda.get_rng_state_all()
        return cls(streams)

    def restore(self) -> None:
        """Make this the present state.

        Raises:
            UsageError: another thread has drawn from torch's stream since the last run of ours: setting it would wind
                that back.
        """
        if not self.streams:
            return
        _refuse_other_draws()
        torch.default_generator.set_state(self.streams["torch"])
        random.setstate(self.streams["python"])
        if "numpy" in self.streams:
            import numpy

            numpy.random.set_state(self.streams["numpy"])
        if "cuda" in self.streams:
            torch.cuda.set_rng_state_all(self.streams["cuda"])
        if _noted.state is not None:
            _noted.state = self.streams["torch"]

    def differing(self, other: RandomState) -> tuple[str, ...]:
        """Return the names of the streams that differ from the other state's."""
        both = [name for name in self.streams if name in other.streams]
        return tuple(name for name in both if _plain(self.streams[name]) != _plain(other.streams[name]))


_left_alone: ContextVar[bool] = ContextVar("_left_alone", default=False)
_QUIET = 0.1
"""Seconds in which no other thread draws from torch's stream, if one is to be set."""


class _Noted:
    """State of torch's stream as the last run of ours left it; None where nobody else is there to draw."""

    state: torch.Tensor | None = None
    running = False
    """Whether a run of ours is under way."""


_noted = _Noted()


def _refuse_other_draws() -> None:
    if _noted.state is None or torch.equal(_noted.state, torch.default_generator.get_state()):
        return
    _noted.state = None
    raise UsageError(
        "another thread draws from torch's random stream while runs are compared that begin in one state of it",
        expected="no other thread that draws meanwhile",
        do="Wait until that thread is done, or plan without a proof: memplan.plan",
    )


@contextmanager
def drawing() -> Iterator[None]:
    """Run a part of a step, which may draw from torch's stream."""
    if _noted.running:
        yield
        return
    _refuse_other_draws()
    _noted.running = True
    try:
        yield
    finally:
        _noted.running = False
        if _noted.state is not None:
            _noted.state = torch.default_generator.get_state()


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, (tuple, list)):
        return [_plain(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


@contextmanager
def random_state_kept(*, draws: bool = True) -> Iterator[None]:
    """Restore the random streams afterwards; while other threads run, only if what runs in here draws from them.

    Raises:
        UsageError: another thread draws from torch's stream meanwhile. Then it stays as that thread leaves it.
    """
    others, outermost = threading.active_count() > 1, _noted.state is None
    if others and not draws:
        token = _left_alone.set(True)
        try:
            yield
        finally:
            _left_alone.reset(token)
        return
    state = RandomState.now()
    if others and outermost and state.streams:
        _noted.state = state.streams["torch"]
        time.sleep(_QUIET)
        _refuse_other_draws()
    watched = _noted.state is not None
    try:
        yield
    finally:
        try:
            if not watched or _noted.state is not None:
                state.restore()
        finally:
            if outermost:
                _noted.state = None


@contextmanager
def as_trained(*, draws: bool = True) -> Iterator[None]:
    """Run steps with gradients and without anomaly mode's checks, whatever the caller has switched on; and restore the
    random streams afterwards (`random_state_kept`)."""
    with (
        random_state_kept(draws=draws), torch.inference_mode(False), torch.enable_grad(),
        _torch.without_anomaly_checks(), outside_of(_torch.outside_of_modes),
    ):  # fmt: skip
        yield


@contextmanager
def on_its_own(step: nn.Module, *, draws: bool = True) -> Iterator[None]:
    """Detach a step from the caller's context as `as_trained` does, and from hooks of the outermost module and
    autocast."""
    with as_trained(draws=draws), without_hooks(step), _torch.outside_autocast():
        yield
