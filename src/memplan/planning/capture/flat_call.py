"""Flatten the arguments of a call to tensors, from which a graph is captured and with which the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Flattened arguments: tensors in order, and the structure with all other arguments."""

    tensors: tuple[torch.Tensor, ...]
    structure: Structure
    likes: tuple[torch.Tensor | None, ...] = ()
    """By tensor, the original of a subclass on the same memory, or None if it is plain."""

    @property
    def kinds(self) -> tuple[type | None, ...]:
        """Return the subclass of each tensor; empty if all are plain."""
        return tuple([None if like is None else type(like) for like in self.likes])

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with these tensors."""
        return self.structure.rebuild(tensors)

    def name_of(self, number: int) -> str:
        """Return the argument that contains the tensor at an index, as in ``argument attention_mask``."""
        placeholders = [object() for _ in self.tensors]
        args, kwargs = self.structure.rebuild(placeholders)
        for name, argument in (*enumerate(args), *kwargs.items()):
            if any(leaf is placeholders[number] for leaf in _torch.tree_leaves(argument)):
                return f"argument {name}"
        return f"input {number}"

    @property
    def constants(self) -> tuple[Any, ...]:
        """Return the arguments that are not tensors, in order."""
        return tuple(self.structure.constants())

    @property
    def aliases(self) -> tuple[int, ...]:
        """For each tensor, the index of the first tensor in the same memory: its own unless two arguments share
        memory. Calls that differ in this are different steps."""
        first_index: dict[int, int] = {}
        return tuple(first_index.setdefault(_memory(tensor), index) for index, tensor in enumerate(self.tensors))


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Flatten arguments. Tensors of subclasses that leave memory and dispatch to torch become plain tensors."""
    tensors, structure = take_apart((tuple(args), dict(kwargs)))
    is_plain = [_torch.kind_of(tensor) is None for tensor in tensors]
    if all(is_plain):
        return Call(tensors, structure)
    pairs = list(zip(tensors, is_plain, strict=True))
    plain_tensors = tuple(tensor if plain else _torch.plain(tensor) for tensor, plain in pairs)
    return Call(plain_tensors, structure, tuple(None if plain else tensor for tensor, plain in pairs))


@dataclass(frozen=True)
class Returned:
    """Recipe that builds a model's output from the tensors that its graph returns."""

    structure: Structure
    output_indices: tuple[int, ...]
    """Index among the graph's outputs of each tensor of the output."""
    detached_outputs: tuple[int, ...] = ()
    """Outputs that have a gradient in the model but not in the graph, because the loss does not read them."""

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output with these tensors, the graph's outputs in order."""
        return self.structure.rebuild([tensors[index] for index in self.output_indices])


class Flat(nn.Module):
    """A model as a function from tensors to a tuple of tensors. The model itself is not changed.

    Its parameters and buffers are the model's, each once (also if tied), as ``tensor_0`` and so on (`paths`).
    Replacements of them, as by functional_call, are passed on to the model in each call.

    Args:
        model, call: the model and its arguments.
        context: context manager that the model runs in.
        convert_outputs: converts the outputs to the dtypes and layouts that the caller expects.
        output_structure: of the converted outputs, since containers may store a dtype; None: as the model returns it.
        flags: returns the flags that the last call read as guards.
    """

    def __init__(
        self, model: nn.Module, call: Call, context: Callable[[], AbstractContextManager[Any]],
        convert_outputs: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = lambda outputs: outputs,
        output_structure: Structure | None = None, flags: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:  # fmt: skip
        super().__init__()
        self._convert_outputs, self._output_structure, self._flags = convert_outputs, output_structure, flags
        self.dtypes: tuple[torch.dtype, ...] = ()
        """Dtypes of the outputs of the last call, before any cast."""
        self._models = (_WithoutHooks(model),)  # in a tuple, so that its parameters are not this module's, too
        self._call, self._context = call, context
        self.paths: dict[str, str] = {}
        """The model's name of each parameter and buffer of this module."""
        for path, parameter in model.named_parameters():
            self.register_parameter(self._register_name(path), parameter)
        for path, buffer in model.named_buffers():
            self.register_buffer(self._register_name(path), buffer)
        self.returned: Returned | None = None
        """Recipe of the output of the last call."""
        self.replaced_buffers: tuple[str, ...] = ()
        """Names in the model of the buffers whose new values were the last outputs."""

    @property
    def hooked_parameters(self) -> frozenset[str]:
        """Names in the model of the parameters with post-accumulate-grad hooks."""
        return frozenset(self.paths[name] for name, p in self.named_parameters() if _torch.has_gradient_hooks(p))

    def _register_name(self, path: str) -> str:
        """Return an attribute name without dots for the parameter or buffer ``path``; add it to `paths`."""
        name = f"tensor_{len(self.paths)}"
        self.paths[name] = path
        return name

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model. Return its output tensors, then the flags of guards, then the new values of buffers. A tensor
        that the model returns twice is returned once. Outputs that the loss does not read are detached."""
        args, kwargs = self._call.rebuild(tensors)
        state = {path: getattr(self, name) for name, path in self.paths.items()}
        with self._context():
            output = self._models[0].called(state, args, kwargs)
        outputs, structure = take_apart(output)
        self.dtypes = tuple(tensor.dtype for tensor in outputs)
        converted = self._convert_outputs(outputs)
        has_converted = any(after is not before for after, before in zip(converted, outputs, strict=True))
        if self._output_structure or has_converted:
            output = (self._output_structure or structure).rebuild(converted)
            outputs, structure = take_apart(output)
        unique = list({id(tensor): tensor for tensor in outputs}.values())  # in order
        index_of = {id(tensor): index for index, tensor in enumerate(unique)}
        with_gradient = {id(tensor) for tensor in differentiable(output)}  # what the backward pass starts from
        cut = tuple(index for index, t in enumerate(unique) if t.requires_grad and id(t) not in with_gradient)
        self.returned = Returned(structure, tuple(index_of[id(tensor)] for tensor in outputs), cut)
        used_bases = {_base(tensor) for tensor in (*tensors, *state.values())}
        new_buffers = self._models[0].replaced
        self.replaced_buffers = tuple(new_buffers)
        overwritten = {_memory(state[path]) for path in new_buffers}  # the step writes the new values there
        return (
            *(_without_view(t, used_bases) if id(t) in with_gradient else _detached(t, overwritten) for t in unique),
            *(_detached(t, overwritten) for t in (*self._flags(), *new_buffers.values())),
        )


def _without_view(tensor: torch.Tensor, used_bases: set[int]) -> torch.Tensor:
    """Return an output, cloned if it shares memory with inputs, state or earlier outputs. ``used_bases``: ids of the
    base tensors of these (see `_base`); the base of this output is added."""
    if _base(tensor) in used_bases:
        return tensor.clone()
    used_bases.add(_base(tensor))
    return tensor


def _detached(tensor: torch.Tensor, overwritten: set[int]) -> torch.Tensor:
    """Detach a tensor. It is cloned if its memory is in ``overwritten``: keys of buffers that get new values."""
    return tensor.detach().clone() if _memory(tensor) in overwritten else tensor.detach()


def _base(tensor: torch.Tensor) -> int:
    """Return the id of the tensor whose view this tensor is; its own id if it is no view."""
    return id(_torch.viewed(tensor))


def _memory(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors in the same storage; unique for empty tensors, which share nothing."""
    strided = tensor.layout == torch.strided and tensor.numel() > 0
    return _torch.storage_key(tensor.untyped_storage()) if strided else id(tensor)


class _WithoutHooks(nn.Module):
    """A model without its own hooks, which run before and after the planned step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._state: Mapping[str, torch.Tensor] = {}
        """Tensors that replace parameters and buffers in the running call, by name; empty between calls."""
        self.replaced: dict[str, torch.Tensor] = {}
        """New tensors of the buffers that forward() replaced in the last call, by name."""

    def called(self, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output. ``state``: tensors to use as its parameters and buffers, by name."""
        self._state = state
        try:
            tensors = (*self.model.named_parameters(), *self.model.named_buffers())
            replacements = {id(tensor): state[path] for path, tensor in tensors if path in state}
            with _torch.tensors_replaced(self.model, replacements):
                return self(*args, **kwargs)
        finally:
            self._state = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and record the buffers that it replaces."""
        for hook in _torch.pre_hooks(self.model):  # model.forward() does not call them
            if is_transparent(hook):
                hook(self.model, args)
        output = self.model.forward(*args, **kwargs)
        self.replaced = {
            path: buffer
            for path, buffer in self.model.named_buffers()
            if path in self._state and buffer is not self._state[path]
        }
        for path, buffer in self.replaced.items():
            before = self._state[path]
            if before.shape != buffer.shape or before.dtype != buffer.dtype:
                raise UsageError(
                    f"forward() puts {_shape_and_dtype(buffer)} in the place of the buffer {path}, "
                    f"{_shape_and_dtype(before)}",
                    expected="buffers that keep their shape and dtype",
                    do="Keep what changes its shape out of forward()",
                )
        return output


def _shape_and_dtype(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Hooks of transformers and peft that only set ``requires_grad`` of an output."""
_TRANSPARENT = ("torch.nn.utils.", "transformers.utils.output_capturing")
"""Modules whose hooks are a part of forward(); the second collects hidden states during the call."""


def is_transparent(hook: Any) -> bool:
    """Return whether a hook has no side effects beyond the call, such as torch's hooks that compute a weight."""
    module = getattr(hook, "__module__", "") or type(hook).__module__
    return module.startswith(_TRANSPARENT) or getattr(hook, "__name__", "") in _GRADIENT_HOOKS
