"""Read an fx graph of a step into a JointGraph."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan._interrupts import safe_point
from memplan.errors import InputError, RecordingError, UsageError
from memplan.planning.capture import opaque_calls
from memplan.planning.capture.kernel_memory import kernel_scratch
from memplan.planning.capture.tiling import tile_scratch
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Kind, Ref, Value, refs
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES
from memplan.planning.passes.share_autocast_casts import CAST
from memplan.planning.passes.split_convolution_backward import without_unread_tensors
from memplan.trace.records import HOST
from memplan.trace.semantics.cpu.table import transient_bytes
from memplan.trace.semantics.traced_results import TRAINING_NORM, eager_arguments

_KINDS: Mapping[str, Kind] = {"parameter": "parameter", "buffer": "buffer", "input": "input", "tangent": "tangent"}


class Values:
    """Values of a graph, read from its nodes. ``paths`` has the model's name of a parameter or buffer by the traced
    module's; ``aliases`` the first input with the same memory, by input; ``hooked`` are parameters with hooks that may
    change them in the backward pass."""

    def __init__(
        self, joint: _torch.Joint, paths: Mapping[str, str], aliases: Sequence[int], hooked: Collection[str]
    ) -> None:
        self._module, self._paths, self._aliases, self._hooked = joint.module, paths, aliases, hooked
        self.all: list[Value] = []
        """The values so far; an id is the position in this list."""
        self.constants: dict[int, torch.Tensor] = {}
        """Tensors that are constants of the graph, by value."""
        self.outputs_with_tangent: list[int] = []
        """Outputs with a tangent, in the order of the tangents."""
        self.on_cpu = True
        """Whether all values are on the CPU or on meta."""
        self.id_of_node: dict[Any, Any] = {}
        """Ids of values by node."""
        self.id_of_placeholder: dict[_torch.Role, int] = {}
        """Values of placeholders, by role."""
        self._on_card = any(node.meta["val"].device.type == "cuda" for node in _placeholders(joint))
        """Whether any placeholder is on the card."""
        self._owner_of_storage: dict[int, int] = {}
        """By key of a storage: the first value in it, whose bytes count; the others count 0."""
        for node, role in zip(_placeholders(joint), joint.inputs, strict=True):
            self._add_placeholder(node, role)

    def _add_placeholder(self, node: Any, role: _torch.Role) -> None:
        """Add the value of a graph input: a parameter, a buffer, an argument of the call or a tangent. Raises
        UsageError if the step has an input that plans do not support."""
        if role.kind == "token":  # orders ops with effects, and has no memory
            return
        if role.kind not in _KINDS:
            raise UsageError(
                f"The traced step takes something unexpected ({role.name})",
                expected="parameters, buffers and inputs",
                do="Leave that part out of the plan",
            )
        if role.kind == "tangent" and role.index < 0:  # of a changed input, not of an output
            raise UsageError(
                "forward() changes a parameter, or an input that needs a gradient, in place",
                expected="parameters that only the optimizer changes (an embedding with max_norm changes its own)",
                do="Change a copy, or leave that layer out of the plan",
            )
        path = self._paths[role.name] if role.name else str(role.index)
        value_id = self._add(node.name, _KINDS[role.kind], node.meta["val"], path=path)
        if role.kind == "input" and self._aliases[role.index] != role.index:  # its memory counts for another input
            self.all[value_id] = replace(self.all[value_id], bytes=0)
        if role.kind == "parameter" and path in self._hooked:
            self.all[value_id] = replace(self.all[value_id], hooked=True)
        self.id_of_node[node] = self.id_of_placeholder[role] = value_id
        if role.kind == "tangent":
            self.outputs_with_tangent.append(role.index)

    def add_constant(self, node: Any) -> None:
        """Add a constant tensor of the graph: one value for all nodes that get the same tensor. Raises RecordingError
        if it is a `torch.Generator`, and InputError if it needs a gradient."""
        tensor = getattr(self._module, node.target)
        if isinstance(tensor, torch.Generator):
            _refuse_generator(node)
        if tensor.requires_grad:
            _refuse_unregistered(node, tensor)
        value = next((value for value, constant in self.constants.items() if constant is tensor), None)
        if value is None:
            value = self._add(node.name, "constant", tensor)
            self.constants[value] = tensor
        self.id_of_node[node] = value
        node.meta.setdefault("val", tensor)

    def add_results(
        self, node: Any, results: Sequence[Any], token_count: int, op: int
    ) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        """Add a value for each result of an op that another op reads. ``op``: index of the op. Its node returns
        ``token_count`` effect tokens before the results.

        Returns:
            The value of each result, None for a result that nothing reads; and the bytes of each unread result, which
            is freed as soon as the op returns, 0 for others.
        """
        single = isinstance(node.meta["val"], torch.Tensor)
        if single:
            position_by_node = {node: 0}
        else:  # a node that returns a tuple has a getitem node for each item that is read
            items = {user: user.args[1] for user in node.users if user.target is operator.getitem}
            position_by_node = {user: item - token_count for user, item in items.items() if item >= token_count}
        names = {position: result_node.name for result_node, position in position_by_node.items()}
        outputs: list[int | None] = []
        discarded = [0] * len(results)
        for position, tensor in enumerate(results):
            if not isinstance(tensor, torch.Tensor):
                outputs.append(None)
            elif position in names:
                outputs.append(self._add(names[position], "result", tensor, op, operand_bases=self._bases(node)))
            else:
                outputs.append(None)
                is_new_memory = _torch.storage_key(tensor.untyped_storage()) not in self._owner_of_storage
                discarded[position] = self._size(tensor) if is_new_memory else 0
        self.id_of_node.update({result_node: outputs[position] for result_node, position in position_by_node.items()})
        return tuple(outputs) or (None,), tuple(discarded)

    def references(self, arguments: Any) -> Any:
        """Return the arguments of a node with a `Ref` in place of each node, at any depth."""
        if isinstance(arguments, torch.fx.Node):
            return Ref(self.id_of_node[arguments])
        if isinstance(arguments, (tuple, list)):  # fx has lists and dicts of its own
            references = map(self.references, arguments)
            return tuple(references) if isinstance(arguments, tuple) else list(references)
        if isinstance(arguments, dict):
            return {name: self.references(part) for name, part in arguments.items()}
        return arguments

    def _add(
        self, name: str, kind: Kind, tensor: torch.Tensor, op: int | None = None, path: str = "",
        operand_bases: Mapping[int, int] = {},  # read only
    ) -> int:  # fmt: skip
        """Add a value and return its id. A result in the memory of an earlier value is a view; placeholders are none.

        ``operand_bases``: the base of an operand of the op, by key of its storage. As several parameters can share a
        storage, it takes precedence over the storage's first owner.
        """
        key = _torch.storage_key(tensor.untyped_storage())
        value_id = len(self.all)
        self.on_cpu &= tensor.device.type in ("cpu", "meta")
        owner = operand_bases.get(key, self._owner_of_storage.setdefault(key, value_id))
        base = owner if op is not None else value_id
        size = self._size(tensor) if owner == value_id else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(value_id, name, kind, base, size, tuple(tensor.shape), tuple(tensor.stride()), dtype, op, path)
        place = str(tensor.device) if tensor.device.type == "cuda" else HOST
        self.all.append(replace(value, place=place))
        return value_id

    def _size(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor: in blocks on a card; 0 in host memory if the step is on a card."""
        size = int(tensor.untyped_storage().nbytes())
        if not self._on_card:
            return size
        return round_to_blocks(size) if tensor.device.type == "cuda" else 0

    def _bases(self, node: Any) -> dict[int, int]:
        """Return the base of the first operand of a node in each storage, by the storage's key."""
        bases: dict[int, int] = {}
        for source in node.all_input_nodes:
            if source in self.id_of_node and isinstance(source.meta["val"], torch.Tensor):
                key = _torch.storage_key(source.meta["val"].untyped_storage())
                bases.setdefault(key, self.all[self.id_of_node[source]].base)
        return bases


class Reader:
    """Reads a joint graph. ``paths``, ``aliases``, ``hooked``: as for `Values`; ``written`` are the model's names of
    buffers whose new values are the last outputs."""

    def __init__(
        self, joint: _torch.Joint, paths: Mapping[str, str], written: Sequence[str], aliases: Sequence[int],
        hooked: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._joint, self._written, self._aliases = joint, written, aliases
        self.values = Values(joint, paths, aliases, hooked)
        self.ops: list[GraphOp] = []
        self.autocast_regions: dict[int, int] = {}
        """The autocast region that caches the result, by index of an op that is a cast of autocast."""
        self._forward_op_by_sequence: dict[int, int] = {}
        """Forward op by autograd sequence number."""
        self._sequences: list[int] = []
        """Autograd sequence numbers of forward ops, in order; empty until all forward ops are read."""
        self._mutated: set[int] = set()
        """Values that the step changes."""

    def graph(self) -> JointGraph:
        """Read all nodes: the forward ops, then the backward ops, each in the order of the nodes. Raises UsageError if
        forward() changes inputs or buffers in a way that plans do not support, and RecordingError if a node is no op of
        dense tensors."""
        nodes, values = list(self._joint.module.graph.nodes), self.values
        output = next(node for node in nodes if node.op == "output")
        results = [
            (node, role)
            for node, role in zip(output.args[0], self._joint.outputs, strict=True)
            if role is not None and role.kind != "token"
        ]
        self._mutated = {
            values.id_of_placeholder[role.of] for _, role in results if role.kind == "mutation" and role.of
        }
        self._mutated |= {value.id for value in values.all if value.kind == "buffer" and value.path in self._written}
        for node in nodes:
            if node.op == "get_attr":
                values.add_constant(node)
        calls = [node for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
        for backward in (False, True):
            for node in calls:
                if _torch.is_backward(node) == backward:
                    safe_point()
                    self._add_op(node)
            self._sequences = sorted(self._forward_op_by_sequence)
        return self._joint_graph(results)

    def _joint_graph(self, results: Sequence[tuple[Any, _torch.Role]]) -> JointGraph:
        """Build the graph from all values and ops that were read. ``results``: its output nodes with their roles."""
        values, placeholders = self.values.id_of_node, self.values.id_of_placeholder
        outputs: list[int] = []
        gradients: list[tuple[int, int]] = []
        mutations: list[tuple[int, int]] = []
        for node, role in results:
            if role.kind == "output":
                outputs.append(values[node])
            elif role.kind == "gradient" and role.of is not None:
                if node is not None:
                    gradients.append((placeholders[role.of], values[node]))
            elif role.kind == "mutation" and role.of is not None:
                if role.of.kind == "input" and self._aliases.count(self._aliases[role.of.index]) > 1:
                    raise UsageError(
                        f"forward() changes input {role.of.index} in place, and another input shares its memory",
                        expected="inputs that are changed to have memory of their own",
                        do="Pass a copy",
                    )
                mutations.append((placeholders[role.of], values[node]))
            else:
                raise UsageError(
                    f"forward() changes more of a tensor than its values ({role.name})",
                    expected="inputs and buffers that keep shape and strides",
                    do="Do that to a copy",
                )
        buffers = {value.path: value.id for value in self.values.all if value.kind == "buffer"}
        returned = len(outputs) - len(self._written)  # the other outputs are new values of buffers
        written = {buffers[path]: value for path, value in zip(self._written, outputs[returned:], strict=True)}
        return JointGraph(
            tuple(self.values.all), tuple(self.ops), tuple(outputs[:returned]), tuple(gradients),
            tuple({**dict(mutations), **written}.items()),
            torch=torch.__version__,
        )  # fmt: skip

    def _add_op(self, node: Any) -> None:
        """Append the op of a call node, with its operands, results, workspace and place in the user's code."""
        index, first_new_value = len(self.ops), len(self.values.all)
        effect = _torch.effect_of(node)  # with_effects(token, op, *arguments) returns (token, *results)
        function, arguments = (node.target, node.args) if effect is None else (effect, node.args[2:])
        layer, where = _torch.place_of(node)
        if not _torch.is_op(function):
            raise RecordingError(
                f"{function} takes functions, not only tensors, and a plan has no ops for that",
                expected="ops of tensors",
                do="Leave that layer out of the plan",
                layer=layer,
                where=where,
            )
        target, result = str(function), node.meta["val"]
        token_count = 0 if effect is None else 1
        results = (result,) if isinstance(result, torch.Tensor) else tuple(result)[token_count:]
        _refuse_sparse(results, target, layer, where)
        # Whether the op itself returns a tuple: with_effects returns one for a single result, too.
        multiple = len(results) > 1 if token_count else not isinstance(result, torch.Tensor)
        outputs, discarded = self.values.add_results(node, results, token_count, index)
        args = without_unread_tensors(target, self.values.references(tuple(arguments)))
        args = eager_arguments(target, args, results[0] if results else None)
        kwargs = self.values.references(dict(node.kwargs))
        makes = tuple(v.id for v in self.values.all[first_new_value:] if v.base == v.id)  # no views
        reads = tuple(dict.fromkeys(self.values.all[v].base for v in refs((args, kwargs))))
        backward = _torch.is_backward(node)
        layer, where, forward_op = self._locate(node, index, backward)
        scratch, requests = _scratch(node, target) if effect is None else (0, ())
        autocast_region = None if backward else _torch.cast_in(node)
        if target == CAST and autocast_region is not None:
            self.autocast_regions[index] = autocast_region
        self.ops.append(
            GraphOp(
                index, target, args, kwargs, "backward" if backward else "forward", outputs, multiple, reads, makes,
                sum(discarded), discarded, scratch=scratch, requests=requests,
                random=_torch.is_random(function, args, kwargs),
                must_run_once=effect is not None or self._must_run_once(target, reads),
                layer=layer, where=where, gradient_of=forward_op,
                held_values=tuple(refs(args[2])) if target == _torch.OPAQUE_BACKWARD else (), call=_torch.call_of(node),
            )
        )  # fmt: skip

    def _locate(self, node: Any, index: int, backward: bool) -> tuple[str, str | None, int | None]:
        """Return the layer and line of an op, and the index of the forward op whose derivative it is part of.

        A backward op shares the autograd sequence number of its forward op, and gets its layer and line. The index is
        None for a forward op, and for a backward op without such a number.
        """
        sequence = _torch.sequence_of(node)
        if not backward:
            if sequence is not None:
                self._forward_op_by_sequence.setdefault(sequence, index)
            return *_torch.place_of(node), None
        if sequence is None or not self._sequences or sequence > self._sequences[-1]:
            return "", None, None
        # A number without a forward op belongs to a change in place: the next number's op reads its result.
        same_or_next = self._sequences[bisect.bisect_left(self._sequences, sequence)]
        forward_op = self._forward_op_by_sequence[same_or_next]
        return self.ops[forward_op].layer, self.ops[forward_op].where, forward_op

    def _must_run_once(self, target: str, reads: tuple[int, ...]) -> bool:
        """Return whether an op must not be recomputed. ``reads``: the values that it reads.

        An opaque call saves tensors for its derivative, a library's op may draw random numbers, and a tensor that the
        step changes has another value later.
        """
        if target == _torch.OPAQUE or opaque_calls.is_library_op(target):
            return True
        # A training batch norm changes its running statistics, but its results do not depend on them.
        return target != TRAINING_NORM and any(value in self._mutated for value in reads)


def _scratch(node: Any, target: str) -> tuple[int, tuple[int, ...]]:
    """Return the workspace of an op in bytes, and the requests to the allocator that it consists of (see
    `GraphOp.requests`; empty: unknown)."""
    fake_args, fake_kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    of_kernel = kernel_scratch(target, fake_args, fake_kwargs)
    if of_kernel is not None:
        return of_kernel
    scratch = opaque_calls.scratch(target, fake_args)
    if scratch is None:
        scratch = tile_scratch(target, fake_args)
    if scratch is None:  # an op of torch
        scratch = transient_bytes(target, fake_args, fake_kwargs, node.meta["val"]) + NUMBER_TENSOR_BYTES
    return scratch, ()


def _placeholders(joint: _torch.Joint) -> list[Any]:
    return [node for node in joint.module.graph.nodes if node.op == "placeholder"]


def _refuse_sparse(results: Sequence[Any], target: str, layer: str, where: str | None) -> None:
    """Raise RecordingError for results that are not strided, as plans count the single storage of each tensor."""
    not_strided = [t.layout for t in results if isinstance(t, torch.Tensor) and t.layout != torch.strided]
    if not_strided:
        raise RecordingError(
            f"{target} makes a tensor of layout {not_strided[0]}",
            expected="dense tensors",
            do="Leave that layer out of the plan",
            layer=layer,
            where=where,
        )


def _refuse_generator(node: Any) -> NoReturn:
    """Raise RecordingError for a `torch.Generator` that forward() draws from."""
    layer, where = _place_of(node)
    raise RecordingError(
        "forward() draws from a torch.Generator, and memplan plans only draws from torch's own random state",
        expected="random numbers without generator=",
        do="Draw without it, seeded by torch.manual_seed(), or pass what was drawn as an input",
        layer=layer or None,
        where=where,
    )


def _place_of(node: Any) -> tuple[str, str | None]:
    """Return the layer and line of the first node that reads a constant and has a known place; else ("", None)."""
    places = map(_torch.place_of, node.users)
    return next((place for place in places if any(place)), ("", None))


def _refuse_unregistered(node: Any, tensor: torch.Tensor) -> NoReturn:
    """Raise InputError for an unregistered tensor that needs a gradient, which a plan would not compute."""
    layer, where = _place_of(node)
    place = ", ".join(part for part in (layer, where) if part)
    what = "A parameter" if isinstance(tensor, torch.nn.Parameter) else "A tensor"
    raise InputError(
        f"{what} of shape {tuple(tensor.shape)} needs a gradient and is not registered with the model"
        + (f" ({place})" if place else ""),
        expected="what is trained to be a parameter of the model, or of a loss that is a module, or an input",
        do="Register it as a parameter (nn.ParameterList instead of a list), or detach it",
    )
