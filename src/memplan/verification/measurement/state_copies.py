"""Run a module with copies of its state: the user's parameters, buffers and random state do not change."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._interrupts import in_place_of, outside_of
from memplan.errors import UsageError
from memplan.planning.capture.side_effects import without_hooks
from memplan.planning.graph.tensor_like import spanned_elements
from memplan.trace.spec import like as copied


class ModuleCopy:
    """A copy of the state of a module and its submodules, with which the module can run.

    Parameters are new leaves without hooks and without ``.grad``. Tied weights stay tied, and tensors that share a
    storage share it in the copy. Lists, dicts and sets among the attributes are copied. Tensors that are neither
    parameters nor buffers are not, as a plan may know them by identity; their values are restored after each run. All
    other attributes are shared.

    Args:
        module: the module.
        shared: parameters are new leaves on the module's own memory, for runs without updates.
        float64: floating-point tensors are in float64, each in its own storage.
    """

    def __init__(self, module: nn.Module, *, shared: bool = False, float64: bool = False) -> None:
        """``shared``: parameters are new leaves on the module's own memory; ``float64``: floating-point tensors are in
        float64."""
        self._copier = copier = _Copier(shared, float64)
        self._module = module
        self._submodules = tuple(module.modules())
        """The module itself and all modules within it."""
        states = [_torch.own_state(submodule) for submodule in self._submodules]
        self._attributes = [dict(state.attributes) for state in states]
        """Attributes of each submodule other than parameters, buffers and submodules, as they were."""
        # All parameters and buffers first, since attributes may refer to them.
        tensors = [(copier.tensors(state.parameters), copier.tensors(state.buffers)) for state in states]
        self._states = list[_torch.OwnState]()
        """The copied state of each submodule."""
        for (parameters, buffers), state in zip(tensors, states, strict=True):
            attributes = {name: copier.copy_attribute(value) for name, value in state.attributes.items()}
            self._states.append(_torch.OwnState(parameters, buffers, attributes, state.hooks))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the module has the copied state. Its changes persist in the copy."""
        originals = [_torch.own_state(submodule) for submodule in self._submodules]

        def restore() -> None:
            """Store the module's state in this copy, and restore the module's own."""
            self._states = [_torch.own_state(submodule) for submodule in self._submodules]
            self._set(originals)

        try:
            with drawing_random_numbers(), in_place_of(lambda: self._set(self._states), restore):
                yield
        finally:
            self._copier.restore_shared()

    def _set(self, states: list[_torch.OwnState]) -> None:
        """Set the state of each submodule."""
        for submodule, state in zip(self._submodules, states, strict=True):
            _torch.set_own_state(submodule, state)

    def reset_attributes(self) -> None:
        """Set all attributes but parameters and buffers to those that the module had when it was copied, its call
        included, which a plan may have replaced since."""
        self._copier.forget_containers()
        for index, attributes in enumerate(self._attributes):
            copies = {name: self._copier.copy_attribute(value) for name, value in attributes.items()}
            self._states[index] = replace(self._states[index], attributes=copies)

    def copy_numbers_from(self, other: ModuleCopy) -> None:
        """Set attributes that are numbers, such as a count of calls, to those of another copy of the same module."""
        for own, others in zip(self._states, other._states, strict=True):
            own.attributes.update(
                {name: value for name, value in others.attributes.items() if isinstance(value, (int, float))}
            )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Copied parameters by name, tied parameters once."""
        with self.in_place():
            return dict(self._module.named_parameters())

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Copied buffers by name, each tensor once."""
        with self.in_place():
            return dict(self._module.named_buffers())


def copy_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy a call's tensors. Tensors that are identical or share memory do so in the copies, since a plan is made for
    calls with the same aliases. Only views of a storage in several dtypes get memory of their own."""
    by_storage: dict[int, dict[int, torch.Tensor]] = {}  # tensors by id(), by key of the storage
    for tensor in tensors:
        has_storage = tensor.layout == torch.strided and tensor.numel() > 0
        key = _torch.storage_key(tensor.untyped_storage()) if has_storage else id(tensor)
        by_storage.setdefault(key, {})[id(tensor)] = tensor
    copies: dict[int, torch.Tensor] = {}
    for group in by_storage.values():
        if len(group) == 1 or len({tensor.dtype for tensor in group.values()}) > 1:
            copies.update({key: copied(tensor, tensor.device) for key, tensor in group.items()})
        else:
            copies.update(_copy_aliases(group))
    return [copies[id(tensor)] for tensor in tensors]


def _copy_aliases(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copy tensors of the same storage and dtype, by key. Only the part of the storage that they use is copied."""
    begin = min(tensor.storage_offset() for tensor in tensors.values())
    end = max(tensor.storage_offset() + spanned_elements(tensor.shape, tensor.stride()) for tensor in tensors.values())
    copies: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        first = next(iter(tensors.values()))
        storage = torch.as_strided(first, (end - begin,), (1,), begin).clone().untyped_storage()
        for key, tensor in tensors.items():
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(storage, tensor.storage_offset() - begin, tensor.shape, tensor.stride())
            copies[key] = copy.requires_grad_(tensor.requires_grad)
    return copies


@contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and its submodules afterwards, since tracing runs their Python code."""
    states = [(submodule, _torch.own_state(submodule)) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, state in states:
            _torch.set_own_state(submodule, state)


class _Copier:
    """Copies tensors and containers, each once. ``shared`` and ``float64``: as for `ModuleCopy`."""

    def __init__(self, shared: bool, float64: bool) -> None:
        """Arguments are as for `ModuleCopy`."""
        self._shared, self._float64 = shared, float64
        self._copies: dict[int, Any] = {}
        """Copies by id() of the original."""
        self._originals: list[Any] = []
        """Keeps the originals alive, so that their ids are not reused."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Copies of storages, by the original's key."""
        self._uncopied: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """(tensor, its version, a copy of its values) of tensors that are shared with the module, by id()."""

    def tensors(self, named: dict[str, Any]) -> dict[str, Any]:
        """Copy parameters or buffers by name; None stays."""
        return {
            name: None if tensor is None else self._copy_once(tensor, self._copy_tensor)
            for name, tensor in named.items()
        }

    def copy_attribute(self, value: Any) -> Any:
        """Return the copy of any other attribute.

        Containers are copied with their elements. A tensor is copied if it is trained, copied already as a parameter,
        or if the copies are in float64. Other tensors are shared: `_uncopied` has their version and values, by which a
        step that changes them is noticed. All else is shared.
        """
        if isinstance(value, torch.Tensor):
            is_trained = value.is_leaf and value.requires_grad
            if id(value) in self._copies or is_trained or self._float64:
                return self._copy_once(value, self._copy_tensor)
            self._uncopied[id(value)] = value, _torch.version_of(value), value.detach().clone()
            return value
        if type(value) is list:
            return self._copy_once(value, lambda old: [self.copy_attribute(item) for item in old])
        if type(value) is dict:
            return self._copy_once(value, lambda old: {key: self.copy_attribute(item) for key, item in old.items()})
        if type(value) is tuple:
            return self._copy_once(value, lambda old: tuple(self.copy_attribute(item) for item in old))
        return self._copy_once(value, set) if type(value) is set else value

    def forget_containers(self) -> None:
        """Forget the copies of lists, dicts, tuples and sets, so that these are copied anew; those of tensors stay."""
        for value in [value for value in self._originals if isinstance(value, (list, dict, tuple, set))]:
            self._copies.pop(id(value), None)
        self._originals = [value for value in self._originals if id(value) in self._copies]

    def restore_shared(self) -> None:
        """Restore the values of tensors that are shared with the module, if a run changed them."""
        for key, (tensor, version, values) in self._uncopied.items():
            if _torch.version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(values)
                self._uncopied[key] = tensor, _torch.version_of(tensor), values

    def _copy_once(self, value: Any, copy: Callable[[Any], Any]) -> Any:
        """Return ``copy(value)``, the same object each time, so that references to the same object stay such."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value  # ends the recursion in a container that contains itself
            self._copies[id(value)] = copy(value)
            self._originals.append(value)
        return self._copies[id(value)]

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor. Copies of tensors that share a storage share one, except in float64."""
        if self._shared and isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), tensor.requires_grad)
        if self._float64 and tensor.is_floating_point():
            copy = tensor.detach().to(torch.float64)
        elif type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            copy = tensor.detach().clone()
        else:
            storage = tensor.untyped_storage()
            key = _torch.storage_key(storage)
            if key not in self._storages:
                raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._storages[key] = raw.clone().untyped_storage()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)


@dataclass(frozen=True)
class RandomState:
    """State of this process's random streams: torch's, Python's and numpy's; empty where `random_state_restored` does
    not touch them."""

    generators: dict[str, Any]

    @classmethod
    def now(cls) -> RandomState:
        """Return the current state."""
        if _generators_untouched.get():
            return cls({})
        generators: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
        if "numpy" in sys.modules:
            import numpy

            generators["numpy"] = numpy.random.get_state()
        if torch.cuda.is_initialized():
            generators["cuda"] = torch.cuda.get_rng_state_all()
        return cls(generators)

    def restore(self) -> None:
        """Make this the current state. Raises UsageError if another thread has drawn from torch's stream since
        memplan's last run: it would draw the same numbers again."""
        if not self.generators:
            return
        _refuse_other_draws()
        torch.default_generator.set_state(self.generators["torch"])
        random.setstate(self.generators["python"])
        if "numpy" in self.generators:
            import numpy

            numpy.random.set_state(self.generators["numpy"])
        if "cuda" in self.generators:
            torch.cuda.set_rng_state_all(self.generators["cuda"])
        if _torch_generator.expected is not None:
            _torch_generator.expected = self.generators["torch"]

    def differences(self, other: RandomState) -> tuple[str, ...]:
        """Return the names of the streams that differ from the other state's."""
        in_both = [name for name in self.generators if name in other.generators]
        states, other_states = (_to_comparable([each.generators[name] for name in in_both]) for each in (self, other))
        return tuple(
            name for name, state, other_state in zip(in_both, states, other_states, strict=True) if state != other_state
        )


_generators_untouched: ContextVar[bool] = ContextVar("_generators_untouched", default=False)
"""Whether the random streams are neither read nor set."""
_QUIET_SECONDS = 0.1
"""Seconds in which no other thread may draw from torch's stream before it is set."""


class _TorchGeneratorWatch:
    """Watches torch's random stream for draws of other threads."""

    expected: torch.Tensor | None = None
    """State after memplan's last run; None where there are no other threads."""
    running = False
    """Whether a run of memplan is under way, which may draw."""


_torch_generator = _TorchGeneratorWatch()


def _refuse_other_draws() -> None:
    """Raise UsageError if another thread has drawn from torch's generator since memplan's last run."""
    if _torch_generator.expected is None or torch.equal(_torch_generator.expected, torch.default_generator.get_state()):
        return
    _torch_generator.expected = None
    raise UsageError(
        "another thread draws from torch's random stream while runs are compared that begin in one state of it",
        expected="no other thread that draws meanwhile",
        do="Wait until that thread is done, or plan without a proof: memplan.plan",
    )


@contextmanager
def drawing_random_numbers() -> Iterator[None]:
    """Within this context memplan may draw from torch's stream, without being mistaken for another thread."""
    if _torch_generator.running:
        yield
        return
    _refuse_other_draws()
    _torch_generator.running = True
    try:
        yield
    finally:
        _torch_generator.running = False
        if _torch_generator.expected is not None:
            _torch_generator.expected = torch.default_generator.get_state()


def _to_comparable(state: Any) -> Any:
    """Return the state of a random number generator with lists in place of tensors and arrays."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, (tuple, list)):
        return [_to_comparable(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


@contextmanager
def random_state_restored(*, draws: bool = True) -> Iterator[None]:
    """Restore the random streams afterwards.

    ``draws``: whether code in this context may draw from them. If not, they are not touched while other threads run.
    Raises UsageError if another thread draws from torch's stream meanwhile, which is not restored then."""
    has_other_threads, outermost = threading.active_count() > 1, _torch_generator.expected is None
    if has_other_threads and not draws:
        token = _generators_untouched.set(True)
        try:
            yield
        finally:
            _generators_untouched.reset(token)
        return
    state = RandomState.now()
    if has_other_threads and outermost and state.generators:
        _torch_generator.expected = state.generators["torch"]
        time.sleep(_QUIET_SECONDS)  # for draws of other threads
        _refuse_other_draws()
    watched = _torch_generator.expected is not None
    try:
        yield
    finally:
        try:
            if not watched or _torch_generator.expected is not None:
                state.restore()
        finally:
            if outermost:
                _torch_generator.expected = None


@contextmanager
def training_context(*, draws: bool = True) -> Iterator[None]:
    """Run steps in grad mode and without anomaly detection, regardless of the caller's modes, and restore the random
    streams afterwards (``draws``: see `random_state_restored`)."""
    with (
        random_state_restored(draws=draws), torch.inference_mode(False), torch.enable_grad(),
        _torch.without_anomaly_checks(), outside_of(_torch.outside_of_modes),
    ):  # fmt: skip
        yield


@contextmanager
def isolated(step: nn.Module, *, draws: bool = True) -> Iterator[None]:
    """Run steps within this context in grad mode, without the caller's modes, autocast and anomaly detection, and
    without the hooks of ``step`` itself. Random streams are restored (``draws``: see `random_state_restored`)."""
    with training_context(draws=draws), without_hooks(step), _torch.outside_autocast():
        yield
