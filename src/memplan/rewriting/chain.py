"""A planned step as autograd sees it: a chain of small nodes, one for each moment at which gradients are complete.

Autograd runs the chain from the outputs on. A node of each output takes its gradient and only stores it: the arguments
of the node that used it would keep it alive. Each further node lets the backward pass run up to its own gradients and
hands them over at once; autograd adds them to ``.grad``, calls hooks, reduces them between processes, and all that
before the next node runs. Where only some gradients are asked for, autograd does not run the nodes beyond them.

There is a chain for each set of outputs that gradients depend on, behind those outputs alone. So what no loss is
computed from is not reached: its parameters get no gradient, and no hook of theirs is called. What runs first of
several nodes that could is the one made last: outputs, then the gradients in the order of the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.errors import BackwardError

Given = list[tuple[int, torch.Tensor]]
Backward = Callable[[list[Any], list[torch.Tensor], list[torch.Tensor]], Iterator[Given]]


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient of an output, as the backward pass needs it."""

    output: int
    """Index of the output among all that are returned."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Chain:
    """What the chains of all calls of one planned step have in common."""

    backward: Backward
    """The program's."""
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    """Of each list that it yields, by number: values whose gradients are in it and depend on the same tangents."""
    tangents: tuple[Tangent, ...]
    reached: Mapping[int, frozenset[int]]
    """By value that a gradient is of: positions of the tangents that it depends on, one at least."""
    unplanned: Mapping[int, str]
    """By index, outputs that have a gradient in the model but not in the plan, and what to say of them."""
    overwritten: frozenset[int]
    """Positions of the saved values that the backward pass writes over."""
    guarded: tuple[tuple[int, str], ...]
    """What must not change before it is read in backward: position among what is handed in, and what it is called."""
    exposed: tuple[tuple[int, ...], ...]
    """For each list, which of ``guarded`` are read after a hook on their own gradient may have changed them."""

    def attach(
        self,
        inputs: list[Any],
        saved: list[torch.Tensor],
        outputs: list[torch.Tensor],
        receivers: Mapping[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """The outputs of a forward pass with the chain behind them.

        Args:
            inputs: what was handed in, None for what the backward pass does not read.
            saved: what the forward pass saved.
            outputs: what it returned.
            receivers: the tensors that gradients are of, by value.
        """
        call = _Call(self, inputs, saved, outputs)
        tokens: dict[frozenset[int], torch.Tensor] = {}
        """By set of tangents: what stands for the first node that depends on these."""
        for number, values in reversed(self.parts):
            among, of = self.reached[values[0]], [receivers[value] for value in values]
            following = [token.grad_fn for token in tokens.values()]
            tokens[among] = _Gradients.apply(call, number, values, following, tokens.get(among), *of)
        results = list(outputs)
        for at, tangent in enumerate(self.tangents):
            behind = [token for among, token in tokens.items() if at in among] or tokens.values()
            results[tangent.output] = _Output.apply(call, at, [outputs[tangent.output]], *behind)
        for at, name in self.unplanned.items():
            results[at] = _Unplanned.apply(name, [outputs[at]], *tokens.values())
        return results


class _Call:
    """What one call keeps from its forward to its backward pass."""

    def __init__(
        self, chain: Chain, inputs: list[Any], saved: list[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        self._chain = chain
        self._inputs: list[Any] | None = inputs
        self._saved: list[torch.Tensor] | None = saved
        self._devices = [outputs[tangent.output].device for tangent in chain.tangents]
        self._versions = [_torch.version_of(inputs[at]) for at, _ in chain.guarded]
        memory = {output.untyped_storage().data_ptr() for output in outputs}
        returned = [at for at, tensor in enumerate(saved) if tensor.untyped_storage().data_ptr() in memory]
        self._returned = [(at, _torch.version_of(saved[at])) for at in returned]
        self._running: Iterator[Given] | None = None
        self._next = 0
        """The group that it gives next."""
        self._given: dict[int, torch.Tensor] = {}
        """Gradients of the last group, by value, that are not handed over."""
        self._pass = -1
        """Which of autograd's backward passes it runs in."""
        self._received: dict[int, torch.Tensor | None] | None = None
        """Gradients of outputs by their position, until the backward pass begins."""
        self.nodes: dict[int, weakref.ref[Any]] = {}
        """By position: the autograd node that such a gradient comes through."""
        self._there = frozenset[int]()
        """Positions of the gradients of outputs with which it began."""

    def receive(self, at: int, tangent: torch.Tensor | None) -> None:
        """The gradient of an output, before the backward pass begins."""
        if torch.is_grad_enabled():
            raise BackwardError(
                "Double backward through a planned step",
                expected="create_graph=False, since a planned backward pass cannot be differentiated",
                do="Run this step without a plan",
            )
        now = _torch.backward_pass()
        if now != self._pass:
            self._pass, self._received, self._running = now, {}, None
        assert self._received is not None, "it began when all were there"
        self._received[at] = tangent

    def _begin(self) -> None:
        """Run the backward pass, with the gradients of the outputs that were received."""
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
        for at, version in self._returned:
            if _torch.version_of(self._saved[at]) != version:
                raise _changed("An output that the backward pass reads")
        saved, inputs = list(self._saved), list(self._inputs)
        if _torch.keeps_graph():
            for at in self._chain.overwritten:
                saved[at] = _laid_out(saved[at], saved[at].shape, saved[at].stride(), copied=True)
        else:
            self._saved = None
        received = {at: one for at, one in self._received.items() if one is not None}
        self._received, self._there = None, frozenset(received)
        tangents = list[torch.Tensor]()
        for at, (wanted, device) in enumerate(zip(self._chain.tangents, self._devices, strict=True)):
            given = received.pop(at, None)
            if given is None:
                given = torch.zeros((), dtype=wanted.dtype, device=device).expand(wanted.shape)
            tangents.append(_laid_out(given, wanted.shape, wanted.stride))
        self._running, self._next = self._chain.backward(inputs, saved, tangents), 0

    def gradients(self, group: int, values: tuple[int, ...], following: list[Any]) -> list[torch.Tensor | None]:
        """Run on, up to these gradients. None for those that depend on none of the gradients that were received.

        Args:
            group: which they are in: 0 is the first in the backward pass.
            values: what they are of.
            following: the first autograd nodes of those that are still to come, of each chain.
        """
        try:
            if _torch.backward_pass() == self._pass and self._received is not None:
                self._begin()
            if self._running is None or _torch.backward_pass() != self._pass or group < self._next - 1:
                raise BackwardError(
                    "Two backward passes at once through one planned step", expected="one after the other"
                )
            while self._next <= group:
                self._run_on()
        except BaseException:
            self._end()
            raise
        made = [self._given.pop(value) for value in values]
        if not any(map(_torch.will_run, following)):
            self._end()
        return [
            one if self._chain.reached[value] & self._there else None for value, one in zip(values, made, strict=True)
        ]

    def _run_on(self) -> None:
        """Up to the next group."""
        assert self._running is not None
        self._given = {}
        if self._next:
            self._check(self._chain.exposed[self._next - 1])
        with _torch.without_autocast():
            given = next(self._running)
        self._given = dict(given)
        given.clear()
        self._next += 1

    def _end(self) -> None:
        """Nothing more is asked for: free what is left."""
        self._running, self._given = None, {}
        if self._saved is None:
            self._inputs = None

    def _check(self, which: Iterable[int]) -> None:
        assert self._inputs is not None
        for number in which:
            at, name = self._chain.guarded[number]
            if _torch.version_of(self._inputs[at]) != self._versions[number]:
                raise _changed(name)


def _changed(name: str) -> BackwardError:
    return BackwardError(
        f"{name} was changed in place after the forward pass and before its last use in the backward pass",
        expected="no such change: the gradients would be wrong",
        do="Change it after backward(), or change a copy",
    )


def _laid_out(
    tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], *, copied: bool = False
) -> torch.Tensor:
    """A tensor with the strides that the program was made for."""
    same = all(n <= 1 or a == b for n, a, b in zip(shape, tensor.stride(), stride, strict=True))
    if same and not copied:
        return tensor
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Gradients(torch.autograd.Function):
    """Hands over the gradients of one group. What it returns stands for the order: nothing flows through it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        group: int,
        values: tuple[int, ...],
        following: list[Any],
        token: torch.Tensor | None,
        *receivers: torch.Tensor,
    ) -> torch.Tensor:
        """Note what backward needs."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.group, ctx.values, ctx.following = call, group, values, following
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Let the backward pass run up to this group."""
        return None, None, None, None, None, *ctx.call.gradients(ctx.group, ctx.values, ctx.following)


class _Output(torch.autograd.Function):
    """A differentiable output, as a tensor of its own: what is saved must not hold the graph that holds it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, at: int, outputs: list[torch.Tensor], *tokens: torch.Tensor) -> torch.Tensor:
        """Pass the output on."""
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
    """An output that the plan has no gradient for."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: list[torch.Tensor], *tokens: torch.Tensor) -> torch.Tensor:
        """Pass the output on."""
        ctx.name = name
        return outputs[0].detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Say why there is no gradient."""
        raise BackwardError(
            f"Backward from {ctx.name}, which was not planned with a gradient",
            expected="backward from the loss that the step was planned for",
            do="Give the loss that you want, as loss= or with memplan.with_loss, and plan that",
        )
