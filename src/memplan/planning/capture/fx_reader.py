"""A traced joint graph as plain data: from the nodes of an fx graph to a JointGraph."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from memplan import _torch
from memplan.errors import InputError, RecordingError, UsageError
from memplan.planning.capture import opaque_calls
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Kind, Ref, Value, refs
from memplan.planning.graph.op_schema import NUMBERS
from memplan.planning.graph.placement import blocks
from memplan.planning.passes.share_autocast_casts import CAST
from memplan.planning.passes.split_convolution_backward import idle_arguments
from memplan.trace.records import HOST
from memplan.trace.semantics.cpu.table import transient_bytes
from memplan.trace.semantics.traced_results import TRAINING_NORM, eager_arguments

_KINDS: Mapping[str, Kind] = {"parameter": "parameter", "buffer": "buffer", "input": "input", "tangent": "tangent"}


class Reader:
    """Reads one joint graph."""

    def __init__(
        self,
        joint: _torch.Joint,
        paths: Mapping[str, str],
        written: Sequence[str],
        aliases: Sequence[int],
        hooked: Collection[str] = (),
    ) -> None:
        """Take a graph.

        Args:
            joint: what was traced.
            paths: by the traced module's name of a parameter or buffer, the model's.
            written: the model's names of buffers whose new values are the last outputs.
            aliases: for each input the first one that shares its memory.
            hooked: the model's names of parameters with hooks that may change them in the backward pass.
        """
        self.joint, self.paths, self.written, self.aliases, self.hooked = joint, paths, written, aliases, hooked
        self.values: list[Value] = []
        self.ops: list[GraphOp] = []
        self.constants: dict[int, torch.Tensor] = {}
        """Tensors that the graph holds itself, by the value they are."""
        self.casts: dict[int, int] = {}
        """By forward op that is a cast of autocast's own: the region of autocast in which it is kept."""
        self.tangents: list[int] = []
        """Which of the outputs have a tangent, in the order of the tangents."""
        self.on_cpu = True
        """Whether all that it read is there, or stands for what is."""
        self._on_card = any(node.meta["val"].device.type == "cuda" for node in _placeholders(joint))
        self._value: dict[Any, Any] = {}
        """By node: the id of its value, or ids for an op with several results."""
        self._owner: dict[int, int] = {}
        """By storage: the value that owns it."""
        self._handed: dict[_torch.Role, int] = {}
        self._forward_op: dict[int, int] = {}
        """By sequence number: the forward op that drew it."""
        self._sequences: list[int] = []
        """Its keys, in order."""
        self._mutated: set[int] = set()

    def graph(self) -> JointGraph:
        """Read all nodes: forward before backward, else in order."""
        nodes = list(self.joint.module.graph.nodes)
        for node, role in zip(_placeholders(self.joint), self.joint.inputs, strict=True):
            self._placeholder(node, role)
        output = next(node for node in nodes if node.op == "output")
        results = [
            (node, role)
            for node, role in zip(output.args[0], self.joint.outputs, strict=True)
            if role is not None and role.kind != "token"
        ]
        self._mutated = {self._handed[role.of] for _, role in results if role.kind == "mutation" and role.of}
        self._mutated |= {value.id for value in self.values if value.kind == "buffer" and value.path in self.written}
        for node in nodes:
            if node.op == "get_attr":
                self._constant(node)
        calls = [node for node in nodes if node.op == "call_function" and node.target is not operator.getitem]
        for backward in (False, True):
            for node in calls:
                if _torch.is_backward(node) == backward:
                    self._call(node)
            self._sequences = sorted(self._forward_op)
        return self._finished(results)

    def _finished(self, results: Sequence[tuple[Any, _torch.Role]]) -> JointGraph:
        outputs: list[int] = []
        gradients: list[tuple[int, int]] = []
        mutations: list[tuple[int, int]] = []
        for node, role in results:
            if role.kind == "output":
                outputs.append(self._value[node])
            elif role.kind == "gradient" and role.of is not None:
                if node is not None:
                    gradients.append((self._handed[role.of], self._value[node]))
            elif role.kind == "mutation" and role.of is not None:
                self._check_changed(role.of)
                mutations.append((self._handed[role.of], self._value[node]))
            else:
                raise UsageError(
                    f"forward() changes more of a tensor than its values ({role.name})",
                    expected="inputs and buffers that keep shape and strides",
                    do="Do that to a copy",
                )
        buffers = {value.path: value.id for value in self.values if value.kind == "buffer"}
        last = len(outputs) - len(self.written)
        written = {buffers[path]: value for path, value in zip(self.written, outputs[last:], strict=True)}
        return JointGraph(
            tuple(self.values), tuple(self.ops), tuple(outputs[:last]), tuple(gradients),
            tuple({**dict(mutations), **written}.items()),
            torch=torch.__version__,
        )  # fmt: skip

    def _check_changed(self, role: _torch.Role) -> None:
        if role.kind == "input" and self.aliases.count(self.aliases[role.index]) > 1:
            raise UsageError(
                f"forward() changes input {role.index} in place, and another input shares its memory",
                expected="inputs that are changed to have memory of their own",
                do="Pass a copy",
            )

    # -- values

    def _add(
        self,
        name: str,
        kind: Kind,
        tensor: torch.Tensor,
        op: int | None = None,
        path: str = "",
        looked_into: Mapping[int, int] = {},  # read only
    ) -> int:
        """A new value. What an op makes of memory that is known is a view; what is handed in never is.

        ``looked_into``: by storage, the base of what the op reads: several parameters can lie in one storage.
        """
        key = _torch.storage_key(tensor.untyped_storage())
        number = len(self.values)
        self.on_cpu &= tensor.device.type in ("cpu", "meta")
        known = looked_into.get(key, self._owner.setdefault(key, number))
        base = known if op is not None else number
        size = self._size(tensor) if known == number else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        made = Value(number, name, kind, base, size, tuple(tensor.shape), tuple(tensor.stride()), dtype, op, path)
        place = str(tensor.device) if tensor.device.type == "cuda" else HOST
        self.values.append(replace(made, place=place))
        return number

    def _size(self, tensor: torch.Tensor) -> int:
        """Bytes that a tensor's memory takes: on a card in blocks; where a step runs there, in host memory none."""
        size = int(tensor.untyped_storage().nbytes())
        if not self._on_card:
            return size
        return blocks(size) if tensor.device.type == "cuda" else 0

    def _discarded(self, result: Any) -> int:
        """The same of a result that nobody reads."""
        if not isinstance(result, torch.Tensor) or _torch.storage_key(result.untyped_storage()) in self._owner:
            return 0
        return self._size(result)

    def _placeholder(self, node: Any, role: _torch.Role) -> None:
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
        path = self.paths[role.name] if role.name else str(role.index)
        number = self._add(node.name, _KINDS[role.kind], node.meta["val"], path=path)
        if role.kind == "input" and self.aliases[role.index] != role.index:
            self.values[number] = replace(self.values[number], bytes=0)
        if role.kind == "parameter" and path in self.hooked:
            self.values[number] = replace(self.values[number], hooked=True)
        self._value[node] = self._handed[role] = number
        if role.kind == "tangent":
            self.tangents.append(role.index)

    def _constant(self, node: Any) -> None:
        tensor = getattr(self.joint.module, node.target)
        if tensor.requires_grad:
            _refuse_unregistered(node, tensor)
        number = next((known for known, one in self.constants.items() if one is tensor), None)
        if number is None:
            number = self._add(node.name, "constant", tensor)
            self.constants[number] = tensor
        self._value[node] = number
        node.meta.setdefault("val", tensor)

    # -- ops

    def _call(self, node: Any) -> None:
        index, first = len(self.ops), len(self.values)
        effect = _torch.effect_of(node)
        function, given = (node.target, node.args) if effect is None else (effect, node.args[2:])
        layer, where = _torch.place_of(node)
        _check(function, layer, where)
        target, found = str(function), node.meta["val"]
        tokens = 0 if effect is None else 1
        results = (found,) if isinstance(found, torch.Tensor) else tuple(found)[tokens:]
        _refuse_sparse(results, target, layer, where)
        multiple = len(results) > 1 if tokens else not isinstance(found, torch.Tensor)
        outputs, discarded = self._outputs(node, results, tokens, index)
        args = eager_arguments(
            target, idle_arguments(target, self._arguments(tuple(given))), results[0] if results else None
        )
        kwargs = self._arguments(node.kwargs)
        makes = tuple(v.id for v in self.values[first:] if v.base == v.id)
        reads = tuple(dict.fromkeys(self.values[v].base for v in refs((args, kwargs))))
        backward = _torch.is_backward(node)
        layer, where, forward = self._place(node, index, backward)
        region = None if backward else _torch.cast_in(node)
        if target == CAST and region is not None:
            self.casts[index] = region
        scratch = 0 if effect is not None else self._scratch(node, target)
        self.ops.append(
            GraphOp(
                index, target, args, kwargs, "backward" if backward else "forward", outputs, multiple, reads, makes,
                discarded, scratch, (), 0.0, _torch.is_random(function, args, kwargs),
                effect is not None or self._once(target, reads), layer, where, forward,
                holds=tuple(refs(args[2])) if target == _torch.OPAQUE_BACKWARD else (),
            )
        )  # fmt: skip

    def _outputs(
        self, node: Any, results: Sequence[Any], tokens: int, index: int
    ) -> tuple[tuple[int | None, ...], int]:
        """Values for the results that somebody reads, and the bytes of those that nobody does."""
        single = isinstance(node.meta["val"], torch.Tensor)
        getters = [] if single else [user for user in node.users if user.target is operator.getitem]
        named = {0: node.name} if single else {user.args[1] - tokens: user.name for user in getters}
        outputs: list[int | None] = []
        discarded = 0
        for position, tensor in enumerate(results):
            if position in named and isinstance(tensor, torch.Tensor):
                outputs.append(self._add(named[position], "result", tensor, index, looked_into=self._bases(node)))
            else:
                outputs.append(None)
                discarded += self._discarded(tensor)
        if single:
            self._value[node] = outputs[0]
        for user in getters:
            if user.args[1] >= tokens:
                self._value[user] = outputs[user.args[1] - tokens]
        return tuple(outputs) or (None,), discarded

    def _bases(self, node: Any) -> dict[int, int]:
        """By storage: the base of the first argument that lies in it."""
        found: dict[int, int] = {}
        for one in node.all_input_nodes:
            if one in self._value and isinstance(one.meta["val"], torch.Tensor):
                key = _torch.storage_key(one.meta["val"].untyped_storage())
                found.setdefault(key, self.values[self._value[one]].base)
        return found

    def _arguments(self, found: Any) -> Any:
        if isinstance(found, torch.fx.Node):
            return Ref(self._value[found])
        if isinstance(found, tuple):
            return tuple(self._arguments(part) for part in found)
        if isinstance(found, list):
            return [self._arguments(part) for part in found]
        if isinstance(found, dict):
            return {name: self._arguments(part) for name, part in found.items()}
        return found

    def _place(self, node: Any, index: int, backward: bool) -> tuple[str, str | None, int | None]:
        sequence = _torch.sequence_of(node)
        if not backward:
            if sequence is not None:
                self._forward_op.setdefault(sequence, index)
            return *_torch.place_of(node), None
        forward = None if sequence is None else self._forward_of(sequence)
        if forward is None:
            return "", None, None
        return self.ops[forward].layer, self.ops[forward].where, forward

    def _forward_of(self, sequence: int) -> int | None:
        """The forward op with a number; where no op of the graph drew it (a change in place), the next one's."""
        at = bisect.bisect_left(self._sequences, sequence)
        return self._forward_op[self._sequences[at]] if at < len(self._sequences) else None

    def _once(self, target: str, reads: tuple[int, ...]) -> bool:
        """An opaque call holds what its derivative needs. A library's op may draw random numbers. A recomputed op would
        read the new value of what the step has changed; a training batch norm does not mind, as its results do not
        depend on the running statistics."""
        if target == _torch.OPAQUE or opaque_calls.is_foreign(target):
            return True
        return target != TRAINING_NORM and any(value in self._mutated for value in reads)

    def _scratch(self, node: Any, target: str) -> int:
        given = _values(node)
        found = opaque_calls.scratch(target, given[0])
        return transient_bytes(target, *given, node.meta["val"]) + NUMBERS if found is None else found


def _placeholders(joint: _torch.Joint) -> list[Any]:
    return [node for node in joint.module.graph.nodes if node.op == "placeholder"]


def _values(node: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments as fake tensors."""
    return torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])  # pyright: ignore


def _check(function: Any, layer: str, where: str | None) -> None:
    """Refuse what cannot be planned.

    Raises:
        RecordingError: it is no op.
    """
    if not _torch.is_op(function):
        raise RecordingError(
            f"{function} takes functions, not only tensors, and a plan has no ops for that",
            expected="ops of tensors",
            do="Leave that layer out of the plan",
            layer=layer,
            where=where,
        )


def _refuse_sparse(results: Sequence[Any], target: str, layer: str, where: str | None) -> None:
    """A plan counts the one storage of each tensor."""
    odd = [one.layout for one in results if isinstance(one, torch.Tensor) and one.layout != torch.strided]
    if odd:
        raise RecordingError(
            f"{target} makes a tensor of layout {odd[0]}",
            expected="dense tensors",
            do="Leave that layer out of the plan",
            layer=layer,
            where=where,
        )


def _refuse_unregistered(node: Any, tensor: torch.Tensor) -> NoReturn:
    """A plan would give it no gradient."""
    layer, where = next((place for user in node.users if any(place := _torch.place_of(user))), ("", None))
    place = ", ".join(part for part in (layer, where) if part)
    what = "A parameter" if isinstance(tensor, torch.nn.Parameter) else "A tensor"
    raise InputError(
        f"{what} of shape {tuple(tensor.shape)} needs a gradient and is not registered with the model"
        + (f" ({place})" if place else ""),
        expected="what is trained to be a parameter of the model, or of a loss that is a module, or an input",
        do="Register it as a parameter (nn.ParameterList instead of a list), or detach it",
    )
