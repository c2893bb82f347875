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
from memplan.planning.graph.op_schema import NUMBERS
from memplan.planning.passes.share_autocast_casts import CAST
from memplan.planning.passes.split_convolution_backward import idle_arguments
from memplan.trace.records import HOST
from memplan.trace.semantics.cpu.table import transient_bytes
from memplan.trace.semantics.traced_results import TRAINING_NORM, eager_arguments

_KINDS: Mapping[str, Kind] = {"parameter": "parameter", "buffer": "buffer", "input": "input", "tangent": "tangent"}


class Values:
    """Values of a graph, read from its nodes.

    Args:
        joint: the traced graph.
        paths: the model's name of a parameter or buffer, by the traced module's name.
        aliases: by input, the first input with the same memory.
        hooked: the model's names of parameters with hooks that may change them in the backward pass.
    """

    def __init__(
        self, joint: _torch.Joint, paths: Mapping[str, str], aliases: Sequence[int], hooked: Collection[str]
    ) -> None:
        self._module, self._paths, self._aliases, self._hooked = joint.module, paths, aliases, hooked
        self.all: list[Value] = []
        self.constants: dict[int, torch.Tensor] = {}
        """Tensors that are constants of the graph, by value."""
        self.tangents: list[int] = []
        """Outputs with a tangent, in the order of the tangents."""
        self.on_cpu = True
        """Whether all values are on the CPU or on meta."""
        self.of: dict[Any, Any] = {}
        """Ids of values by node."""
        self.placeholders: dict[_torch.Role, int] = {}
        """Values of placeholders, by role."""
        self._on_card = any(node.meta["val"].device.type == "cuda" for node in _placeholders(joint))
        self._owner: dict[int, int] = {}
        """Owning value of each storage."""
        for node, role in zip(_placeholders(joint), joint.inputs, strict=True):
            self._add_placeholder(node, role)

    def _add_placeholder(self, node: Any, role: _torch.Role) -> None:
        """Add the value of a graph input: a parameter, a buffer, an argument of the call or a tangent.

        Raises:
            UsageError: the step has an input that plans do not support.
        """
        if role.kind == "token":
            return
        if role.kind not in _KINDS:
            raise UsageError(
                f"The traced step takes something unexpected ({role.name})",
                expected="parameters, buffers and inputs",
                do="Leave that part out of the plan",
            )
        if role.kind == "tangent" and role.index < 0:
            raise UsageError(
                "forward() changes a parameter, or an input that needs a gradient, in place",
                expected="parameters that only the optimizer changes (an embedding with max_norm changes its own)",
                do="Change a copy, or leave that layer out of the plan",
            )
        path = self._paths[role.name] if role.name else str(role.index)
        number = self._add(node.name, _KINDS[role.kind], node.meta["val"], path=path)
        if role.kind == "input" and self._aliases[role.index] != role.index:
            self.all[number] = replace(self.all[number], bytes=0)
        if role.kind == "parameter" and path in self._hooked:
            self.all[number] = replace(self.all[number], hooked=True)
        self.of[node] = self.placeholders[role] = number
        if role.kind == "tangent":
            self.tangents.append(role.index)

    def add_constant(self, node: Any) -> None:
        """Add a constant of the graph."""
        tensor = getattr(self._module, node.target)
        if isinstance(tensor, torch.Generator):
            _refuse_generator(node)
        if tensor.requires_grad:
            _refuse_unregistered(node, tensor)
        number = next((value for value, known_tensor in self.constants.items() if known_tensor is tensor), None)
        if number is None:
            number = self._add(node.name, "constant", tensor)
            self.constants[number] = tensor
        self.of[node] = number
        node.meta.setdefault("val", tensor)

    def add_results(
        self, node: Any, results: Sequence[Any], tokens: int, index: int
    ) -> tuple[tuple[int | None, ...], int]:
        """Add a value for each result of an op that another op reads.

        Args:
            node: the op.
            results: its result tensors.
            tokens: how many outputs of the node are effect tokens, before the results.
            index: the op's index.

        Returns:
            The values by result (None: nothing reads it), and the bytes of results that are freed at once, unread.
        """
        single = isinstance(node.meta["val"], torch.Tensor)
        getters = [] if single else [user for user in node.users if user.target is operator.getitem]
        named = {0: node.name} if single else {user.args[1] - tokens: user.name for user in getters}
        outputs: list[int | None] = []
        discarded = 0
        for position, tensor in enumerate(results):
            if position in named and isinstance(tensor, torch.Tensor):
                outputs.append(self._add(named[position], "result", tensor, index, operand_bases=self._bases(node)))
            else:
                outputs.append(None)
                known = isinstance(tensor, torch.Tensor) and _torch.storage_key(tensor.untyped_storage()) in self._owner
                discarded += self._size(tensor) if isinstance(tensor, torch.Tensor) and not known else 0
        if single:
            self.of[node] = outputs[0]
        for user in getters:
            if user.args[1] >= tokens:
                self.of[user] = outputs[user.args[1] - tokens]
        return tuple(outputs) or (None,), discarded

    def references(self, arguments: Any) -> Any:
        """Return arguments of a node with references to values in place of nodes."""
        if isinstance(arguments, torch.fx.Node):
            return Ref(self.of[arguments])
        if isinstance(arguments, tuple):
            return tuple(self.references(part) for part in arguments)
        if isinstance(arguments, list):
            return [self.references(part) for part in arguments]
        if isinstance(arguments, dict):
            return {name: self.references(part) for name, part in arguments.items()}
        return arguments

    def _add(
        self, name: str, kind: Kind, tensor: torch.Tensor, op: int | None = None, path: str = "",
        operand_bases: Mapping[int, int] = {},  # read only
    ) -> int:  # fmt: skip
        """Add a value and return its id. A result in known memory is a view; placeholders never are.

        ``operand_bases``: bases of the op's operands by storage, as several parameters can share a storage.
        """
        key = _torch.storage_key(tensor.untyped_storage())
        number = len(self.all)
        self.on_cpu &= tensor.device.type in ("cpu", "meta")
        known = operand_bases.get(key, self._owner.setdefault(key, number))
        base = known if op is not None else number
        size = self._size(tensor) if known == number else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = Value(number, name, kind, base, size, tuple(tensor.shape), tuple(tensor.stride()), dtype, op, path)
        place = str(tensor.device) if tensor.device.type == "cuda" else HOST
        self.all.append(replace(value, place=place))
        return number

    def _size(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor: in blocks on a card; 0 in host memory if the step is on a card."""
        size = int(tensor.untyped_storage().nbytes())
        if not self._on_card:
            return size
        return round_to_blocks(size) if tensor.device.type == "cuda" else 0

    def _bases(self, node: Any) -> dict[int, int]:
        """Return the base of the first operand in each storage."""
        bases: dict[int, int] = {}
        for source in node.all_input_nodes:
            if source in self.of and isinstance(source.meta["val"], torch.Tensor):
                key = _torch.storage_key(source.meta["val"].untyped_storage())
                bases.setdefault(key, self.all[self.of[source]].base)
        return bases


class Reader:
    """Reads a joint graph.

    Args:
        joint: the traced graph.
        paths, aliases, hooked: as for `Values`.
        written: the model's names of buffers whose new values are the last outputs.
    """

    def __init__(
        self, joint: _torch.Joint, paths: Mapping[str, str], written: Sequence[str], aliases: Sequence[int],
        hooked: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._joint, self._written, self._aliases = joint, written, aliases
        self.values = Values(joint, paths, aliases, hooked)
        self.ops: list[GraphOp] = []
        self.casts: dict[int, int] = {}
        """Casts of autocast among the forward ops, with the autocast region that caches them."""
        self._forward_op_by_sequence: dict[int, int] = {}
        """Forward op by autograd sequence number."""
        self._sequences: list[int] = []
        """Sequence numbers in order."""
        self._mutated: set[int] = set()

    def graph(self) -> JointGraph:
        """Read all nodes: forward before backward, else in order."""
        nodes, values = list(self._joint.module.graph.nodes), self.values
        output = next(node for node in nodes if node.op == "output")
        results = [
            (node, role)
            for node, role in zip(output.args[0], self._joint.outputs, strict=True)
            if role is not None and role.kind != "token"
        ]
        self._mutated = {values.placeholders[role.of] for _, role in results if role.kind == "mutation" and role.of}
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
        """Build the graph from all values and ops that were read. ``results``: its output nodes with their roles.

        Raises:
            UsageError: forward() changes inputs or buffers in a way that plans do not support.
        """
        values, placeholders = self.values.of, self.values.placeholders
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
        last = len(outputs) - len(self._written)
        written = {buffers[path]: value for path, value in zip(self._written, outputs[last:], strict=True)}
        return JointGraph(
            tuple(self.values.all), tuple(self.ops), tuple(outputs[:last]), tuple(gradients),
            tuple({**dict(mutations), **written}.items()),
            torch=torch.__version__,
        )  # fmt: skip

    def _add_op(self, node: Any) -> None:
        """Append the op of a call node, with its operands, results, workspace and place in the user's code."""
        index, first = len(self.ops), len(self.values.all)
        effect = _torch.effect_of(node)
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
        tokens = 0 if effect is None else 1
        results = (result,) if isinstance(result, torch.Tensor) else tuple(result)[tokens:]
        _refuse_sparse(results, target, layer, where)
        multiple = len(results) > 1 if tokens else not isinstance(result, torch.Tensor)
        outputs, discarded = self.values.add_results(node, results, tokens, index)
        args = eager_arguments(
            target, idle_arguments(target, self.values.references(tuple(arguments))), results[0] if results else None
        )
        kwargs = self.values.references(node.kwargs)
        makes = tuple(v.id for v in self.values.all[first:] if v.base == v.id)
        reads = tuple(dict.fromkeys(self.values.all[v].base for v in refs((args, kwargs))))
        backward = _torch.is_backward(node)
        layer, where, forward = self._locate(node, index, backward)
        region = None if backward else _torch.cast_in(node)
        if target == CAST and region is not None:
            self.casts[index] = region
        scratch = 0
        if effect is None:
            inputs: Any = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            opaque = opaque_calls.scratch(target, inputs[0])
            opaque = tile_scratch(target, inputs[0]) if opaque is None else opaque
            opaque = kernel_scratch(target, *inputs) if opaque is None else opaque
            scratch = transient_bytes(target, inputs[0], inputs[1], result) + NUMBERS if opaque is None else opaque
        self.ops.append(
            GraphOp(
                index, target, args, kwargs, "backward" if backward else "forward", outputs, multiple, reads, makes,
                discarded, scratch, (), 0.0, _torch.is_random(function, args, kwargs),
                effect is not None or self._must_run_once(target, reads), layer, where, forward,
                holds=tuple(refs(args[2])) if target == _torch.OPAQUE_BACKWARD else (), call=_torch.call_of(node),
            )
        )  # fmt: skip

    def _locate(self, node: Any, index: int, backward: bool) -> tuple[str, str | None, int | None]:
        """Return (layer, line, index of the forward op that it differentiates) of an op.

        A backward op shares the autograd sequence number of its forward op, and gets its layer and line. For a forward
        op the third is None.
        """
        sequence = _torch.sequence_of(node)
        if not backward:
            if sequence is not None:
                self._forward_op_by_sequence.setdefault(sequence, index)
            return *_torch.place_of(node), None
        at = len(self._sequences) if sequence is None else bisect.bisect_left(self._sequences, sequence)
        if at == len(self._sequences):
            return "", None, None
        # The next number, where no forward op has this one: it belongs to a change in place.
        forward = self._forward_op_by_sequence[self._sequences[at]]
        return self.ops[forward].layer, self.ops[forward].where, forward

    def _must_run_once(self, target: str, reads: tuple[int, ...]) -> bool:
        """Return whether an op must not be recomputed: an opaque call saves tensors for its derivative, a library's op
        may draw random numbers, and an op may read a tensor that the step changes. (Results of a training batch norm do
        not depend on the running statistics that it changes.)"""
        if target == _torch.OPAQUE or opaque_calls.is_foreign(target):
            return True
        return target != TRAINING_NORM and any(value in self._mutated for value in reads)


def _placeholders(joint: _torch.Joint) -> list[Any]:
    return [node for node in joint.module.graph.nodes if node.op == "placeholder"]


def _refuse_sparse(results: Sequence[Any], target: str, layer: str, where: str | None) -> None:
    """Raise RecordingError for results that are not strided, as plans count the single storage of each tensor."""
    odd = [t.layout for t in results if isinstance(t, torch.Tensor) and t.layout != torch.strided]
    if odd:
        raise RecordingError(
            f"{target} makes a tensor of layout {odd[0]}",
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
    """Return (layer, line) of the first user of a node with a known place."""
    return next((place for user in node.users if any(place := _torch.place_of(user))), ("", None))


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
