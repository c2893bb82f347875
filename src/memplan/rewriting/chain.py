"""Attach a planned backward pass to autograd: a chain of small nodes, one for each group of complete gradients.

Autograd runs the chain starting at the outputs. The node of an output only stores the gradient of the output (as an
argument of a later node it would stay alive). Each further node runs the backward program up to its own gradients and
returns them; autograd accumulates them into ``.grad``, calls hooks and reduces them between processes before the next
node runs. Where only some gradients are requested, autograd skips the nodes after them.

Each set of outputs that gradients depend on has a chain of its own. So a loss that uses some outputs reaches only
their chains: parameters that only other outputs depend on get no gradient, and their hooks are not called. Of several
ready nodes autograd runs the one created last: outputs, then gradients in the order of the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.errors import BackwardError
from memplan.planning.capture.reads.readable import Reads

Gradients = list[tuple[int, torch.Tensor]]
Backward = Callable[[list[Any], list[torch.Tensor], list[torch.Tensor]], Iterator[Gradients]]


@dataclass(frozen=True, slots=True)
class Tangent:
    """Layout of an output's gradient that the backward pass needs."""

    output: int
    """Index among the returned outputs."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Chain:
    """Data of a planned step that all of its calls share."""

    backward: Backward
    """Backward function of the program."""
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    """(number of a list that `backward` yields, values whose gradients are in it and depend on the same tangents)."""
    tangents: tuple[Tangent, ...]
    dependencies: Mapping[int, frozenset[int]]
    """Positions of the tangents that a gradient depends on (at least one), by value with a gradient."""
    unplanned: Mapping[int, str]
    """Names of the outputs that have a gradient in the model but not in the plan, by index."""
    overwritten: frozenset[int]
    """Positions of the saved values that the backward pass overwrites."""
    guarded: tuple[tuple[int, str], ...]
    """(position, name) of the inputs that must not change before the backward pass reads them."""
    reread: tuple[tuple[int, ...], ...]
    """For each list, indices into ``guarded`` of the inputs that are read after a hook on their gradient may have
    changed them."""
    reads: Reads | None = None
    """Python values that code in the backward pass may read (a `torch.autograd.Function`, a hook); checked when the
    backward pass begins."""

    def attach(
        self, inputs: list[Any], saved: list[torch.Tensor], outputs: list[torch.Tensor],
        differentiated: Mapping[int, torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return the outputs of a forward pass with the chain attached as their ``grad_fn``. Inputs are None where the
        backward pass does not read them; ``differentiated`` has the tensors whose gradients are computed, by value."""
        call = _Call(self, inputs, saved, outputs)
        tokens: dict[frozenset[int], torch.Tensor] = {}
        """Result of the first node of each chain, by the positions of the tangents that the chain depends on."""
        for group, values in reversed(self.parts):
            tangents, targets = self.dependencies[values[0]], [differentiated[value] for value in values]
            next_nodes = [token.grad_fn for token in tokens.values()]
            tokens[tangents] = _Gradients.apply(call, group, values, next_nodes, tokens.get(tangents), *targets)
        results = list(outputs)
        for position, tangent in enumerate(self.tangents):
            chain_tokens = [token for tangents, token in tokens.items() if position in tangents]
            chain_tokens = chain_tokens or list(tokens.values())  # an output that no gradient depends on
            results[tangent.output] = _Output.apply(call, position, [outputs[tangent.output]], *chain_tokens)
        for index, name in self.unplanned.items():
            results[index] = _Unplanned.apply(name, [outputs[index]], *tokens.values())
        return results


class _Call:
    """State of one call between its forward and its backward pass."""

    def __init__(
        self, chain: Chain, inputs: list[Any], saved: list[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """``inputs``: None where the backward pass does not read them; ``saved``: what the forward pass saved."""
        self._chain = chain
        self._inputs: list[Any] | None = inputs
        self._saved: list[torch.Tensor] | None = saved
        """None once a backward pass has freed them."""
        # what the backward pass compares: the user may have changed tensors in between
        self._devices = [outputs[tangent.output].device for tangent in chain.tangents]
        """Devices of the outputs with a tangent."""
        self._versions = [_torch.version_of(inputs[at]) for at, _ in chain.guarded]
        """Versions of the guarded inputs."""
        self._storages = [inputs[at].untyped_storage() for at, _ in chain.guarded]
        """Storages of the guarded inputs: assigning to ``.data`` replaces them without a new version."""
        memory = {_torch.storage_key(output.untyped_storage()) for output in outputs}
        self._returned = [
            (at, _torch.version_of(tensor))
            for at, tensor in enumerate(saved)
            if _torch.storage_key(tensor.untyped_storage()) in memory
        ]
        """(index in ``saved``, version) of the saved values that share memory with an output."""
        # the state of the backward pass
        self._running: Iterator[Gradients] | None = None
        """The planned backward pass, which yields gradients; None before it begins."""
        self._next = 0
        """Number of the next group."""
        self._gradients: dict[int, torch.Tensor] = {}
        """Value -> gradient of the last group that is not returned to autograd yet."""
        self._pass = -1
        """Number of the running autograd pass."""
        self._received: dict[int, torch.Tensor | None] | None = None
        """By index of an output with a tangent: its gradient, until the backward pass begins."""
        self.nodes: dict[int, weakref.ref[Any]] = {}
        """By index of an output with a tangent: its autograd node."""
        self._received_at = frozenset[int]()
        """Indices of the outputs whose gradients the backward pass began with."""

    def receive(self, at: int, tangent: torch.Tensor | None) -> None:
        """Store autograd's gradient of an output, None for zeros; ``at`` is its index among the outputs with a tangent.
        The planned backward pass begins once the gradients of all outputs are here."""
        if torch.is_grad_enabled():
            raise BackwardError(
                "Double backward through a planned step",
                expected="create_graph=False, since a planned backward pass cannot be differentiated",
                do="Run this step without a plan",
            )
        now = _torch.backward_pass()
        if now != self._pass:
            self._pass, self._received, self._running = now, {}, None
        assert self._received is not None, "the pass began after all gradients were received"
        self._received[at] = tangent

    def _begin(self) -> None:
        """Start the backward pass with the received gradients of outputs."""
        assert self._received is not None
        nodes = [node() for at, node in self.nodes.items() if at not in self._received]
        if any(node is not None and _torch.will_run(node) for node in nodes):
            raise BackwardError(
                "Backward from several outputs of a planned step, and one of them comes late",
                expected="a loss that is computed in the thread that called the model",
                do="Compute the loss there, or give it as loss=: then the step has one output",
            )
        if self._saved is None or self._inputs is None:
            raise BackwardError(
                "A second backward pass through a planned step whose saved tensors were freed by the first",
                expected="one backward pass from all outputs at once, or retain_graph=True in all but the last",
            )
        self._check(range(len(self._versions)))
        reads = self._chain.reads
        if reads is not None and not reads.are_unchanged():
            raise BackwardError(
                f"The {reads.differences()[0]} changed after the forward pass, and code that runs in the backward pass "
                "(a torch.autograd.Function, a hook, a checkpoint) may read it",
                expected="the value that the step was planned with: the gradients would be wrong",
                do="Change it after backward(), or read it in forward() and keep it on ctx",
            )
        for at, version in self._returned:
            if _torch.version_of(self._saved[at]) != version:
                raise _changed_input_error("An output that the backward pass reads")
        saved, inputs = list(self._saved), list(self._inputs)
        if _torch.keeps_graph():  # a further backward pass needs the saved values
            for at in self._chain.overwritten:
                saved[at] = _with_strides(saved[at], saved[at].shape, saved[at].stride(), copied=True)
        else:
            self._saved = None
        received = {at: tangent for at, tangent in self._received.items() if tangent is not None}
        self._received, self._received_at = None, frozenset(received)
        tangents = list[torch.Tensor]()
        for at, (expected, device) in enumerate(zip(self._chain.tangents, self._devices, strict=True)):
            tangent = received.pop(at, None)
            if tangent is None:
                tangent = torch.zeros((), dtype=expected.dtype, device=device).expand(expected.shape)
            tangents.append(_with_strides(tangent, expected.shape, expected.stride))
        self._running, self._next = self._chain.backward(inputs, saved, tangents), 0

    def gradients(self, group: int, values: tuple[int, ...], next_nodes: list[Any]) -> list[torch.Tensor | None]:
        """Run the backward pass up to a group of gradients, and return some of its gradients.

        A gradient is None if no output that it depends on has a gradient. Groups are numbered in the order of the
        backward pass. ``next_nodes`` has the next autograd node of each chain: if none will run, the state is freed.
        """
        try:
            if _torch.backward_pass() == self._pass and self._received is not None:
                self._begin()
            if self._running is None or _torch.backward_pass() != self._pass or group < self._next - 1:
                raise BackwardError(
                    "Two backward passes at once through one planned step", expected="one after the other"
                )
            while self._next <= group:
                self._compute_next_group()
        except BaseException:
            self._end()
            raise
        gradients = {value: self._gradients.pop(value) for value in values}
        if not any(map(_torch.will_run, next_nodes)):
            self._end()
        dependencies = self._chain.dependencies
        return [gradient if dependencies[value] & self._received_at else None for value, gradient in gradients.items()]

    def _compute_next_group(self) -> None:
        """Run the backward program up to its next list of gradients, and store them in ``_gradients``. First check
        inputs that hooks may have changed since the last group."""
        assert self._running is not None
        self._gradients = {}
        if self._next:
            self._check(self._chain.reread[self._next - 1])
        with _torch.without_autocast():
            gradients = next(self._running)
        self._gradients = dict(gradients)
        gradients.clear()
        self._next += 1

    def _end(self) -> None:
        """Free the remaining state: no further gradient is requested."""
        self._running, self._gradients = None, {}
        if self._saved is None:
            self._inputs, self._storages = None, []

    def _check(self, which: Iterable[int]) -> None:
        """Raise BackwardError if a guarded input (``which``: indices) changed since the forward pass."""
        assert self._inputs is not None
        for index in which:
            at, name = self._chain.guarded[index]
            tensor = self._inputs[at]
            same_storage = _torch.storage_key(tensor.untyped_storage()) == _torch.storage_key(self._storages[index])
            if not same_storage or _torch.version_of(tensor) != self._versions[index]:
                raise _changed_input_error(name)


def _changed_input_error(name: str) -> BackwardError:
    """Return the error for a tensor that changed between forward and backward pass. ``name``: as in messages."""
    return BackwardError(
        f"{name} was changed in place, or its data replaced, after the forward pass and before its last use in the "
        "backward pass",
        expected="no such change: the gradients would be wrong",
        do="Change it after backward(), or change a copy",
    )


def _with_strides(
    tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], *, copied: bool = False
) -> torch.Tensor:
    """Return a tensor of this shape with these strides: itself if it has them, unless ``copied``, else a copy."""
    has_strides = all(n <= 1 or a == b for n, a, b in zip(shape, tensor.stride(), stride, strict=True))
    if has_strides and not copied:
        return tensor
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Gradients(torch.autograd.Function):
    """Autograd node that returns gradients of a group. Its result, a token, only orders the nodes."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, group: int, values: tuple[int, ...], next_nodes: list[Any],
        token: torch.Tensor | None, *differentiated: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Save the arguments of `_Call.gradients`, and return a token. ``token`` is of the node that runs after this
        one; ``differentiated`` are the tensors that get the gradients."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.group, ctx.values, ctx.next_nodes = call, group, values, next_nodes
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Run the planned backward pass up to this group, and return the gradients of ``differentiated``."""
        return None, None, None, None, None, *ctx.call.gradients(ctx.group, ctx.values, ctx.next_nodes)


class _Output(torch.autograd.Function):
    """Autograd node of a differentiable output, which it detaches: saved values form no cycle with the graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, at: int, outputs: list[torch.Tensor], *tokens: torch.Tensor) -> torch.Tensor:
        """Return the only tensor in ``outputs``: in a list, autograd does not see it as an input."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.at, ctx.tokens = call, at, len(tokens)
        call.nodes[at] = weakref.ref(ctx)
        return outputs[0].detach()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """Store the gradient of the output."""
        ctx.call.receive(ctx.at, tangents[0])
        return None, None, None, *[None] * ctx.tokens


class _Unplanned(torch.autograd.Function):
    """Autograd node of an output for which the plan has no gradient: raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: list[torch.Tensor], *tokens: torch.Tensor) -> torch.Tensor:
        """Return the only tensor in ``outputs``: in a list, autograd does not see it as an input."""
        ctx.name = name
        return outputs[0].detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Raise BackwardError."""
        raise BackwardError(
            f"Backward from {ctx.name}, which was not planned with a gradient",
            expected="backward from the loss that the step was planned for",
            do="Give the loss that you want, as loss= or with memplan.with_loss, and plan that",
        )
