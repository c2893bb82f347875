"""Flatten a call of a model to tensors: a graph is captured from them, and the engine is called with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.errors import UsageError
from memplan.planning.capture.loss_module import differentiable
from memplan.trace.structure import Structure, take_apart


@dataclass(frozen=True)
class Call:
    """Flattened arguments: the tensors in order, and the structure that holds their places and the constants."""

    tensors: tuple[torch.Tensor, ...]
    structure: Structure
    likes: tuple[torch.Tensor | None, ...] = ()
    """For each plain tensor made from one of a subclass, the original, on the same memory; else None."""

    @property
    def kinds(self) -> tuple[type | None, ...]:
        """Return the subclass of each tensor; nothing where all are plain."""
        return tuple([None if like is None else type(like) for like in self.likes])

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with these tensors."""
        return self.structure.rebuild(tensors)

    def name_of(self, number: int) -> str:
        """Return the argument that a tensor is in, for people: ``argument attention_mask``, ``argument 0``."""
        marks = [object() for _ in self.tensors]
        args, kwargs = self.structure.rebuild(marks)
        for name, part in (*enumerate(args), *kwargs.items()):
            if any(leaf is marks[number] for leaf in _torch.tree_leaves(part)):
                return f"argument {name}"
        return f"input {number}"

    @property
    def constants(self) -> tuple[Any, ...]:
        """Return the arguments that are no tensors, in order."""
        return tuple(self.structure.constants())

    @property
    def aliases(self) -> tuple[int, ...]:
        """For each tensor, the first one that shares its memory. Calls that differ in this are different steps."""
        first: dict[int, int] = {}
        return tuple(first.setdefault(_memory(tensor), at) for at, tensor in enumerate(self.tensors))


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Flatten arguments. Tensors of subclasses that leave memory and dispatch to torch become plain ones."""
    tensors, structure = take_apart((tuple(args), dict(kwargs)))
    likes = tuple([None if _torch.kind_of(tensor) is None else tensor for tensor in tensors])
    if not any(like is not None for like in likes):
        return Call(tensors, structure)
    plain = (t if like is None else _torch.plain(t) for t, like in zip(tensors, likes, strict=True))
    return Call(tuple(plain), structure, likes)


@dataclass(frozen=True)
class Returned:
    """Recipe that builds a model's output from the tensors that its graph returns."""

    structure: Structure
    order: tuple[int, ...]
    """Index among the graph's outputs of each tensor of the output."""
    cut: tuple[int, ...] = ()
    """Outputs of the graph that have a gradient in the model, but none here: the loss does not read them."""

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output with these tensors, the graph's outputs in order."""
        return self.structure.rebuild([tensors[at] for at in self.order])


class Flat(nn.Module):
    """A model as a function from tensors to a tuple of tensors. It shares the model, and changes nothing of it.

    Its parameters and buffers are the model's, each once, under numbers (`paths`). While it runs, the model has in
    their place what the caller put in the place of its own; so tied parameters are one.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        around: Callable[[], AbstractContextManager[Any]],
        finished: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda outputs: outputs,
        like: Structure | None = None,
        flags: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        super().__init__()
        self._finished, self._like, self._flags = finished, like, flags
        """Makes the outputs what the caller expects, whatever the call computes in; and how they are put together then,
        since objects that hold tensors can note their dtype; and the flags that the last call read as guards."""
        self.dtypes: tuple[torch.dtype, ...] = ()
        """Dtypes of the outputs of the last call, before any cast."""
        self._bare = (_Bare(model),)  # in a tuple, so that its parameters are not this module's, too
        self._call, self._around = call, around
        self.paths: dict[str, str] = {}
        """The model's name of each parameter and buffer of this module."""
        for path, parameter in model.named_parameters():
            self.register_parameter(self._number(path), parameter)
        for path, buffer in model.named_buffers():
            self.register_buffer(self._number(path), buffer)
        self.returned: Returned | None = None
        """Output of the last call, as is ``written``."""
        self.written: tuple[str, ...] = ()
        """Names in the model of the buffers whose new values are returned last."""

    @property
    def hooked(self) -> frozenset[str]:
        """Names in the model of parameters with hooks that run once their gradient was added to ``.grad``."""
        return frozenset(self.paths[name] for name, p in self.named_parameters() if _torch.has_gradient_hooks(p))

    def _number(self, path: str) -> str:
        name = f"tensor_{len(self.paths)}"
        self.paths[name] = path
        return name

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model. Return its outputs, each tensor once, detached where the loss does not read it; then its
        guards' flags, and buffers' new values."""
        args, kwargs = self._call.rebuild(tensors)
        state = {path: getattr(self, name) for name, path in self.paths.items()}
        with self._around():
            output = self._bare[0].called(state, args, kwargs)
        outputs, structure = take_apart(output)
        self.dtypes = tuple(tensor.dtype for tensor in outputs)
        finished = self._finished(outputs)
        if self._like or any(after is not before for after, before in zip(finished, outputs, strict=True)):
            output = (self._like or structure).rebuild(finished)
            outputs, structure = take_apart(output)
        unique = list({id(tensor): tensor for tensor in outputs}.values())
        place = {id(tensor): at for at, tensor in enumerate(unique)}
        wanted = {id(tensor) for tensor in differentiable(output)}
        self.returned = Returned(
            structure,
            tuple(place[id(tensor)] for tensor in outputs),
            tuple(at for at, output in enumerate(unique) if output.requires_grad and id(output) not in wanted),
        )
        bases = {_base(tensor) for tensor in (*tensors, *state.values())}
        replaced = self._bare[0].replaced
        self.written = tuple(replaced)
        changed = {_memory(state[path]) for path in replaced}
        return (
            *(_unshared(t, bases) if id(t) in wanted else _detached(t, changed) for t in unique),
            *(_detached(t, changed) for t in (*self._flags(), *replaced.values())),
        )


def _unshared(tensor: torch.Tensor, bases: set[int]) -> torch.Tensor:
    """Clone an output that views a tensor in ``bases`` (inputs, state, earlier outputs); else add its base to them."""
    if _base(tensor) in bases:
        return tensor.clone()
    bases.add(_base(tensor))
    return tensor


def _detached(tensor: torch.Tensor, changed: set[int]) -> torch.Tensor:
    """Detach a tensor, and clone it if it shares memory with a buffer that gets a new value."""
    return tensor.detach().clone() if _memory(tensor) in changed else tensor.detach()


def _base(tensor: torch.Tensor) -> int:
    return id(_torch.viewed(tensor))


def _memory(tensor: torch.Tensor) -> int:
    strided = tensor.layout == torch.strided and tensor.numel() > 0
    return _torch.storage_key(tensor.untyped_storage()) if strided else id(tensor)


class _Bare(nn.Module):
    """A model without its own hooks: those run around the planned step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._state: Mapping[str, torch.Tensor] = {}
        self.replaced: dict[str, torch.Tensor] = {}
        """Buffers in whose place forward() put another tensor."""

    def called(self, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output with these tensors in place of its parameters and buffers."""
        self._state = state
        try:
            own = {id(tensor): state[path] for path, tensor in self._own() if path in state}
            with _torch.tensors_replaced(self.model, own):
                return self(*args, **kwargs)
        finally:
            self._state = {}

    def _own(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and see what it put in the place of its buffers."""
        for hook in _torch.pre_hooks(self.model):
            if is_transparent(hook):
                hook(self.model, args)
        output = self.model.forward(*args, **kwargs)
        self.replaced = {
            path: buffer
            for path, buffer in self.model.named_buffers()
            if path in self._state and buffer is not self._state[path]
        }
        for path, buffer in self.replaced.items():
            _check_replaced(path, self._state[path], buffer)
        return output


def _check_replaced(path: str, before: torch.Tensor, after: torch.Tensor) -> None:
    if before.shape != after.shape or before.dtype != after.dtype:
        raise UsageError(
            f"forward() puts {_kind(after)} in the place of the buffer {path}, {_kind(before)}",
            expected="buffers that keep their shape and dtype",
            do="Keep what changes its shape out of forward()",
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


_PURE = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Hooks of transformers and peft that only say that an output needs a gradient."""


_MADE_BY = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""Modules whose hooks are no more than a part of forward(): the second collects hidden states for what is returned,
as long as the call lasts."""


def is_transparent(hook: Any) -> bool:
    """Return whether a hook has no effect but on what passes it, or on what the call returns: torch's own, that compute
    a weight, and the like."""
    made_by = getattr(hook, "__module__", "") or type(hook).__module__
    return made_by.startswith(_MADE_BY) or getattr(hook, "__name__", "") in _PURE
