"""A segment of a step as a list of functional aten ops, recorded without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from memplan import _torch
from memplan.planning.graph.joint_graph import Ref, map_refs, refs
from memplan.planning.graph.op_schema import arguments_of, overload
from memplan.planning.graph.tensor_like import Like

BATCH_NORMS = frozenset(
    f"aten.{name}" for name in ("native_batch_norm.default", "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats", "_batch_norm_with_update.default")
)  # fmt: skip
"""Batch norms in training or evaluation."""


SEVERAL_VIEWS = frozenset({"aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default"})
"""Ops that return several views; ``chunk`` is a split."""
_RUNNING = ("running_mean", "running_var")
"""Arguments of a batch norm that it writes in training."""


def without_running_statistics(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the positional arguments of a training batch norm with None for its running statistics: who runs the
    program updates them, once for all pieces."""
    named = arguments_of(target, args, kwargs)
    return tuple(None if name in _RUNNING else value for name, value in named.items())


def views_one_by_one(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the (target, arguments) that compute each of the ``count`` results of an op that returns several views of
    its operand, as ``unbind`` and ``split`` do; [] for other ops.

    Example:
        >>> views_one_by_one("aten.split.Tensor", (Ref(3), 4, 1), {}, 2)
        [('aten.slice.Tensor', (Ref(3), 1, 0, 4)), ('aten.slice.Tensor', (Ref(3), 1, 4, 8))]
    """
    if target not in SEVERAL_VIEWS:
        return []
    named = arguments_of(target, args, kwargs)
    operand, dim = named["self"], named.get("dim", 0)
    if target == "aten.unbind.int":
        return [("aten.select.int", (operand, dim, index)) for index in range(count)]
    sizes = named["split_sizes"] if "split_sizes" in named else [named["split_size"]] * count
    ends = list(accumulate(sizes))
    return [("aten.slice.Tensor", (operand, dim, end - size, end)) for size, end in zip(sizes, ends, strict=True)]


class NotTileable(Exception):
    """A segment cannot run piece by piece; the message says why."""

    at: int | None = None
    """Position of the segment among those of a trace, where that is known."""


@dataclass(frozen=True)
class Node:
    """A call of an op."""

    target: str
    """Name of the op under ``torch.ops``: ``aten.relu.default``."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    """Keyword arguments; here and in ``args``, tensors are Refs, at any depth."""
    outputs: tuple[int, ...]
    """Ids of the results, in order."""

    @property
    def name(self) -> str:
        """Name of the op without namespace and overload."""
        return self.target.split(".")[1]

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Ids of the tensors among the arguments."""
        return tuple(refs((self.args, dict(self.kwargs))))


@dataclass(frozen=True)
class Program:
    """Functional ops of a segment. A value is a tensor that an op returns or that the segment reads from outside; it
    has a number as its id."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    """Values that the segment reads from outside."""
    static_inputs: frozenset[int]
    """Inputs that do not depend on the data of the step, such as parameters."""
    outputs: tuple[int, ...]
    likes: Mapping[int, Like]
    """By value: a tensor like it, without data (shape, strides and dtype)."""
    inputs_without_gradient: frozenset[int] = frozenset()
    """Inputs through which no gradient flows."""


class Recorder:
    """Runs function calls on tensors without data, and records their ops.

    Tensors from outside are replaced by tensors without data. What a call changes in place becomes a new value.
    """

    def __init__(self) -> None:
        self._nodes = list[Node]()
        self._value_of: dict[int, int] = {}
        """By id() of a tensor: its newest value, another one after each change in place."""
        self._alive = list[Tensor]()
        """All tensors, so that no other object gets their id()."""
        self._likes: dict[int, Like] = {}
        """By value: a tensor like it, without data."""
        self._storages: dict[int, set[int]] = {}
        """By key of a storage: id() of the tensors in it."""
        self._stale = set[int]()
        """id() of the tensors of which another view was changed: their value is not known any more."""
        self.sources: dict[int, Tensor] = {}
        """Tensors from outside by value."""
        self._replacements: dict[int, Tensor] = {}
        """By id() of a tensor from outside: the tensor without data in its place."""
        self._static = set[int]()
        """Values that do not depend on data."""
        self._repeated: dict[int, dict[int, int]] = {}
        """By id() of an earlier recording: by its value that is computed again here, the value here."""
        self._mode = _torch.fake_mode()
        self.running: dict[int, tuple[tuple[Tensor, ...], float]] = {}
        """Running mean and variance and the momentum of a training batch norm, by the index of its node."""

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made by a recorded call."""
        return id(tensor) in self._value_of

    def reads(self, tensor: Tensor) -> bool:
        """Return whether a recorded call read a tensor from outside, or other memory of its storage."""
        key = _torch.storage_key(tensor.untyped_storage())
        return any(_torch.storage_key(source.untyped_storage()) == key for source in self.sources.values())

    def share_memory(self, results: Sequence[Tensor]) -> bool:
        """Return whether any results share memory with each other or with tensors from outside of the recording, which
        `_replacements` stand for."""
        keys = [_torch.storage_key(t.untyped_storage()) for t in (*results, *self._replacements.values())]
        return len(set(keys)) < len(keys)

    def call(
        self, func: Callable[..., Any], args: Any, kwargs: Any, is_static: Callable[[Tensor], bool],
        repeated: Callable[[Tensor], Recorder | None] = lambda tensor: None,
    ) -> Any:  # fmt: skip
        """Run a function on tensors without data, and record its ops.

        Args:
            func, args, kwargs: the call.
            is_static: whether a tensor from outside does not depend on the step's data, as parameters do not.
            repeated: returns the earlier recording whose ops compute a tensor from outside; those are recorded again,
                and the tensor is not read. None for a tensor to read.
        """

        def without_data(leaf: Any) -> Any:
            """Return the tensor without data for a tensor from outside, anything else unchanged."""
            if not isinstance(leaf, Tensor) or self.owns(leaf):
                return leaf
            if id(leaf) not in self._replacements:
                earlier = repeated(leaf)
                repeated_value = None if earlier is None else self._repeat(earlier, leaf, without_data)
                replacement = self._replacements[id(leaf)] = Like.of(leaf).empty()
                if repeated_value is None:
                    source = self._add(replacement)
                    self.sources[source] = leaf
                    if is_static(leaf):
                        self._static.add(source)
                else:
                    self._set_value(replacement, repeated_value)
            return self._replacements[id(leaf)]

        with ExitStack() as stack:
            stack.enter_context(_torch.no_modes())
            stack.enter_context(self._mode)
            stack.enter_context(torch.no_grad())
            args, kwargs = _torch.tree_map(without_data, (args, kwargs))
            with _torch.OpsHandled(self.record):
                return func(*args, **kwargs)

    def _repeat(self, earlier: Recorder, tensor: Tensor, without_data: Callable[[Any], Any]) -> int:
        """Record the ops of an earlier recording that compute one of its tensors, and return the tensor's value here.

        ``without_data``: returns the tensor in the place of one from outside. Running statistics are updated by the
        earlier segment alone.
        """
        target = earlier._current_value(tensor)
        value_here = self._repeated.setdefault(id(earlier), {})
        needed, needed_nodes = {target}, list[Node]()
        for node in reversed(earlier._nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.reads)
                needed_nodes.append(node)
        for value in sorted(needed & earlier.sources.keys()):
            value_here[value] = self._value_of[id(without_data(earlier.sources[value]))]
        for node in reversed(needed_nodes):
            if node.outputs[0] in value_here:  # repeated for another tensor
                continue
            for value in node.outputs:
                value_here[value] = len(self._likes)
                self._likes[value_here[value]] = earlier._likes[value]
            args, kwargs = map_refs((node.args, dict(node.kwargs)), lambda value: Ref(value_here[value]))
            self._nodes.append(Node(node.target, args, kwargs, tuple(value_here[value] for value in node.outputs)))
        return value_here[target]

    def record(self, op: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an op on tensors without data and add its functional form to the program.

        Raises:
            NotTileable: it changes a tensor from outside, or a tensor that has other views.
        """
        leaves = [leaf for leaf in _torch.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        if any(not self.owns(leaf) for leaf in leaves):
            raise NotTileable("it reads a tensor that its calls do not name")
        arguments, keywords = _torch.tree_map(self._reference, (tuple(args), dict(kwargs)))
        functional = _functional(op)
        # its result can have a wider dtype than what the op changes in place
        functional_result = None if functional is None else overload(functional)(*args, **kwargs)
        result = op(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, (tuple, list)) else []
        written = _written_tensors(op, args)
        if not written and not results:
            return result  # a question about a tensor, such as its device
        if str(op) in BATCH_NORMS and arguments_of(str(op), args, kwargs).get("training", True) is True:
            self._note_running_statistics(op, args, kwargs)
            arguments, keywords = without_running_statistics(str(op), arguments, keywords), {}
            written = []
        if not written:
            values = tuple(map(self._add, results))
            views = views_one_by_one(str(op), arguments, keywords, len(values))
            self._nodes += [Node(name, of, {}, (value,)) for (name, of), value in zip(views, values, strict=False)]
            self._nodes += [] if views else [Node(str(op), arguments, keywords, values)]
            return result
        if len(written) > 1 or functional is None or self._is_from_outside(self._value_of[id(written[0])]):
            raise NotTileable(f"{op} changes a tensor from outside of the segment")
        (changed,) = written
        views = self._storages[_torch.storage_key(changed.untyped_storage())] - {id(changed)}
        if any(self._is_from_outside(self._value_of[view]) for view in views):
            raise NotTileable(f"{op} changes a view of a tensor from outside of the segment")
        self._stale |= views
        value = len(self._likes)
        self._likes[value] = Like.of(changed)
        self._nodes.append(Node(functional, arguments, keywords, (value,)))
        if functional_result is not None and functional_result.dtype != changed.dtype:  # cast as the op in place does
            wide, value = value, value + 1
            self._likes[wide], self._likes[value] = Like.of(functional_result), Like.of(changed)
            self._nodes.append(Node("aten._to_copy.default", (Ref(wide),), {"dtype": changed.dtype}, (value,)))
        self._value_of[id(changed)] = value
        return result

    def _note_running_statistics(self, op: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note in `running_statistics` those of a training batch norm: who runs the program updates them."""
        named = arguments_of(str(op), args, kwargs)
        running_statistics = [
            self._value_of[id(named[name])] for name in _RUNNING if isinstance(named.get(name), Tensor)
        ]
        if any(value not in self.sources for value in running_statistics):
            raise NotTileable(f"{op} updates running statistics that are computed")
        self.running[len(self._nodes)] = tuple(self.sources[value] for value in running_statistics), named["momentum"]

    def _is_from_outside(self, value: int) -> bool:
        """Return whether a value is a tensor that the segment reads or whose ops it repeats."""
        return value in self.sources or any(value in here.values() for here in self._repeated.values())

    def release(self) -> None:
        """Drop the references to the recorded tensors, which are freed if nothing else refers to them."""
        self._alive.clear()

    def program(self, outputs: Sequence[Tensor]) -> Program:
        """Return the recorded ops as a program. ``outputs``: its results."""
        output_values = tuple(map(self._current_value, outputs))
        nodes = self._read_nodes(output_values)
        read = {value for node in nodes for value in node.reads}
        self.sources = {value: tensor for value, tensor in self.sources.items() if value in read}
        return Program(
            nodes, tuple(self.sources), frozenset(self._static & read), output_values, dict(self._likes),
            frozenset(value for value, tensor in self.sources.items() if not tensor.requires_grad),
        )  # fmt: skip

    def _read_nodes(self, outputs: Sequence[int]) -> tuple[Node, ...]:
        """Return the nodes on which ``outputs`` depend, and the batch norms that update running statistics, by whose
        new indices `running` is from now on. Others, such as a view of a pool's indices, have no effect."""
        needed, kept = set(outputs), set[int]()
        for index in reversed(range(len(self._nodes))):
            if index in self.running or not needed.isdisjoint(self._nodes[index].outputs):
                needed.update(self._nodes[index].reads)
                kept.add(index)
        new_index = {index: number for number, index in enumerate(sorted(kept))}
        self.running = {new_index[index]: statistics for index, statistics in self.running.items()}
        return tuple(self._nodes[index] for index in new_index)

    def _add(self, tensor: Tensor) -> int:
        """Register a tensor as a new value, and return the value's id."""
        value = len(self._likes)
        self._likes[value] = Like.of(tensor)
        self._set_value(tensor, value)
        return value

    def _set_value(self, tensor: Tensor, value: int) -> None:
        """Note that ``value`` is the value of a tensor now."""
        self._value_of[id(tensor)] = value
        self._alive.append(tensor)
        key = _torch.storage_key(tensor.untyped_storage())
        self._storages.setdefault(key, set()).add(id(tensor))

    def _reference(self, leaf: Any) -> Any:
        """Return a Ref to the tensor's value for a tensor, anything else unchanged."""
        return Ref(self._current_value(leaf)) if isinstance(leaf, Tensor) else leaf

    def _current_value(self, tensor: Tensor) -> int:
        """Return the value of a tensor. Raises NotTileable if another view of its memory was changed."""
        if id(tensor) in self._stale:
            raise NotTileable("it changes a tensor that has views, which are read again")
        return self._value_of[id(tensor)]


def _written_tensors(op: Any, args: Any) -> list[Tensor]:
    """Return the tensors among an op's positional arguments that it writes to, by its schema."""
    named = zip(_torch.arguments(op), args, strict=False)
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in _torch.tree_leaves(written) if isinstance(leaf, Tensor)]


def _functional(op: Any) -> str | None:
    """Return the functional form of an in-place op: ``aten.relu.default`` for ``aten.relu_.default``; None for other
    ops."""
    namespace, name, overload = str(op).split(".")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        return None
    return f"{namespace}.{name.rstrip('_')}.{overload}"
