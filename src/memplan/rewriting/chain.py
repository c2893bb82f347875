"""Attach a planned backward pass to autograd: a chain of small nodes, one for each group of complete gradients.

Autograd runs the chain from the outputs on. A node of each output takes its gradient and only stores it: the arguments
of the node that used it would keep it alive. Each further node lets the backward pass run up to its own gradients and
hands them over at once; autograd adds them to ``.grad``, calls hooks and reduces them between processes before the next
node runs. Where only some gradients are requested, autograd does not run the nodes beyond them.

There is a chain for each set of outputs that gradients depend on, behind those outputs alone. So outputs that are not
part of the loss are not reached: parameters that only they depend on get no gradient, and their hooks are not called.
Of several nodes that could run next, autograd takes the one made last: outputs, then gradients in the order of the
backward pass.
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

Given = list[tuple[int, torch.Tensor]]
Backward = Callable[[list[Any], list[torch.Tensor], list[torch.Tensor]], Iterator[Given]]


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
    """Data that the chains of all calls of one planned step share."""

    backward: Backward
    """The program's."""
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    """By number of a list that it yields: values whose gradients are in it and depend on the same tangents."""
    tangents: tuple[Tangent, ...]
    reached: Mapping[int, frozenset[int]]
    """By value with a gradient: positions of the tangents that it depends on, at least one."""
    unplanned: Mapping[int, str]
    """By index, names of outputs that have a gradient in the model but not in the plan."""
    overwritten: frozenset[int]
    """Positions of the saved values that the backward pass overwrites."""
    guarded: tuple[tuple[int, str], ...]
    """Inputs that must not change before the backward pass reads them: position and name."""
    exposed: tuple[tuple[int, ...], ...]
    """For each list, numbers of those in ``guarded`` that are read after a hook on their gradient may change them."""
    reads: Reads | None = None
    """What code that runs in backward may read, as a `torch.autograd.Function` or a hook of the model's own does: it is
    compared when the backward pass begins."""

    def attach(
        self,
        inputs: list[Any],
        saved: list[torch.Tensor],
        outputs: list[torch.Tensor],
        receivers: Mapping[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the outputs of a forward pass with the chain behind them.

        Args:
            inputs: the forward pass's, None for those that the backward pass does not read.
            saved: the values that the forward pass saved.
            outputs: its results.
            receivers: the tensors whose gradients are computed, by value.
        """
        call = _Call(self, inputs, saved, outputs)
        tokens: dict[frozenset[int], torch.Tensor] = {}
        """By set of tangents: result of the first node that depends on these."""
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
    """State of one call between its forward and its backward pass."""

    def __init__(
        self, chain: Chain, inputs: list[Any], saved: list[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        self._chain = chain
        self._inputs: list[Any] | None = inputs
        self._saved: list[torch.Tensor] | None = saved
        self._devices = [outputs[tangent.output].device for tangent in chain.tangents]
        self._versions = [_torch.version_of(inputs[at]) for at, _ in chain.guarded]
        self._storages = [inputs[at].untyped_storage() for at, _ in chain.guarded]
        """Memory of the same: `.data = ...` puts another in its place, and no version says so."""
        memory = {_torch.storage_key(output.untyped_storage()) for output in outputs}
        returned = [at for at, tensor in enumerate(saved) if _torch.storage_key(tensor.untyped_storage()) in memory]
        self._returned = [(at, _torch.version_of(saved[at])) for at in returned]
        self._running: Iterator[Given] | None = None
        self._next = 0
        """Number of the next group."""
        self._given: dict[int, torch.Tensor] = {}
        """Gradients of the last group, by value, that are not handed over yet."""
        self._pass = -1
        """Number of the autograd pass that it runs in."""
        self._received: dict[int, torch.Tensor | None] | None = None
        """Gradients of outputs by position, until the backward pass begins."""
        self.nodes: dict[int, weakref.ref[Any]] = {}
        """Autograd nodes through which these come, by position."""
        self._there = frozenset[int]()
        """Positions of the outputs whose gradients it began with."""

    def receive(self, at: int, tangent: torch.Tensor | None) -> None:
        """Store the gradient of an output, before the backward pass begins."""
        if torch.is_grad_enabled():
            raise BackwardError(
                "Double backward through a planned step",
                expected="create_graph=False, since a planned backward pass cannot be differentiated",
                do="Run this step without a plan",
            )
        now = _torch.backward_pass()
        if now != self._pass:
            self._pass, self._received, self._running = now, {}, None
        assert self._received is not None, "the pass began when all gradients were there"
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
        if reads is not None and not reads.hold():
            raise BackwardError(
                f"The {reads.differing()[0]} changed after the forward pass, and code that runs in the backward pass "
                "(a torch.autograd.Function, a hook, a checkpoint) may read it",
                expected="the value that the step was planned with: the gradients would be wrong",
                do="Change it after backward(), or read it in forward() and keep it on ctx",
            )
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
        """Run on, up to these gradients. None for those that depend on none of the received gradients.

        Args:
            group: number of their group; 0 comes first in the backward pass.
            values: whose gradients.
            following: of each chain, the first autograd node still to come.
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
        complete = [self._given.pop(value) for value in values]
        if not any(map(_torch.will_run, following)):
            self._end()
        return [
            gradient if self._chain.reached[value] & self._there else None
            for value, gradient in zip(values, complete, strict=True)
        ]

    def _run_on(self) -> None:
        """Run up to the next group."""
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
        """Free what is left, as no further gradient is requested."""
        self._running, self._given = None, {}
        if self._saved is None:
            self._inputs, self._storages = None, []

    def _check(self, which: Iterable[int]) -> None:
        assert self._inputs is not None
        for number in which:
            at, name = self._chain.guarded[number]
            tensor = self._inputs[at]
            same = _torch.storage_key(tensor.untyped_storage()) == _torch.storage_key(self._storages[number])
            if not same or _torch.version_of(tensor) != self._versions[number]:
                raise _changed(name)


def _changed(name: str) -> BackwardError:
    return BackwardError(
        f"{name} was changed in place, or its data replaced, after the forward pass and before its last use in the "
        "backward pass",
        expected="no such change: the gradients would be wrong",
        do="Change it after backward(), or change a copy",
    )


def _laid_out(
    tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], *, copied: bool = False
) -> torch.Tensor:
    """Return a tensor with the strides that the program expects."""
    same = all(n <= 1 or a == b for n, a, b in zip(shape, tensor.stride(), stride, strict=True))
    if same and not copied:
        return tensor
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Gradients(torch.autograd.Function):
    """Hand over the gradients of one group. Its result only fixes the order: no gradient flows through it."""

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
        """Keep what backward needs."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.group, ctx.values, ctx.following = call, group, values, following
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Let the backward pass run up to this group."""
        return None, None, None, None, None, *ctx.call.gradients(ctx.group, ctx.values, ctx.following)


class _Output(torch.autograd.Function):
    """Return a differentiable output as a tensor of its own: saved values must not hold the graph that holds them."""

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
    """Refuse the backward pass of an output for which the plan has no gradient."""

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
