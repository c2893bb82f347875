"""A planned step as autograd sees it: a chain of small nodes, one for each moment at which gradients are complete.

Autograd runs the chain from the outputs on. The first node takes the gradients of the outputs and only stores them:
the arguments of the node that used them would keep them alive. Each further node lets the backward pass run up to its
own gradients and hands them over at once; autograd adds them to ``.grad``, calls hooks, reduces them between
processes, and all that before the next node runs. Where only some gradients are asked for, autograd does not run the
nodes beyond them.
"""

from __future__ import annotations

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
    groups: tuple[tuple[int, ...], ...]
    """The values whose gradients each list holds that it yields."""
    tangents: tuple[Tangent, ...]
    unplanned: Mapping[int, str]
    """By index, outputs that have a gradient in the model but not in the plan, and what to say of them."""
    overwritten: frozenset[int]
    """Positions of the saved values that the backward pass writes over."""
    guarded: tuple[tuple[int, str], ...]
    """What must not change before it is read in backward: position among what is handed in, and what it is called."""
    exposed: tuple[tuple[int, ...], ...]
    """For each group, which of ``guarded`` are read after a hook on their own gradient may have changed them."""

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
        token = None
        for number in reversed(range(len(self.groups))):
            token = _Gradients.apply(call, number, token, *(receivers[value] for value in self.groups[number]))
        results = list(outputs)
        wanted = [tangent.output for tangent in self.tangents]
        made = _Outputs.apply(call, token, [outputs[at] for at in wanted])
        for at, result in zip(wanted, made, strict=True):
            results[at] = result
        for at, name in self.unplanned.items():
            results[at] = _Unplanned.apply(name, token, [outputs[at]])
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

    def receive(self, tangents: Sequence[torch.Tensor | None]) -> None:
        """The backward pass begins, with the gradients of the outputs."""
        if torch.is_grad_enabled():
            raise BackwardError(
                "Double backward through a planned step",
                expected="create_graph=False, since a planned backward pass cannot be differentiated",
                do="Run this step without a plan",
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
        parts = zip(tangents, self._chain.tangents, self._devices, strict=True)
        received = [
            _laid_out(
                torch.zeros((), dtype=wanted.dtype, device=device).expand(wanted.shape) if given is None else given,
                wanted.shape,
                wanted.stride,
            )
            for given, wanted, device in parts
        ]
        self._running, self._next = self._chain.backward(inputs, saved, received), 0

    def gradients(self, group: int, following: Any) -> list[torch.Tensor]:
        """Run on, up to the gradients of this group.

        Args:
            group: its number: 0 is the first in the backward pass.
            following: the autograd node of the next group, None where there is none.
        """
        if self._running is None or group != self._next:
            raise BackwardError("Two backward passes at once through one planned step", expected="one after the other")
        if group:
            self._check(self._chain.exposed[group - 1])
        try:
            with _torch.without_autocast():
                given = next(self._running)
        except BaseException:
            self._end()
            raise
        self._next = group + 1
        gradients = [gradient for _, gradient in given]
        given.clear()
        if following is None or not _torch.will_run(following):
            self._end()
        return gradients

    def _end(self) -> None:
        """Nothing more is asked for: free what is left."""
        self._running = None
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
        ctx: Any, call: _Call, group: int, token: torch.Tensor | None, *receivers: torch.Tensor
    ) -> torch.Tensor:
        """Note what backward needs."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.group = call, group
        ctx.following = None if token is None else token.grad_fn
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Let the backward pass run up to this group."""
        return None, None, None, *ctx.call.gradients(ctx.group, ctx.following)


class _Outputs(torch.autograd.Function):
    """The differentiable outputs, as tensors of their own: what is saved must not hold the graph that holds it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Pass the outputs on."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """Store the gradients of the outputs."""
        ctx.call.receive(tangents)
        return None, None, None


class _Unplanned(torch.autograd.Function):
    """An output that the plan has no gradient for."""

    @staticmethod
    def forward(ctx: Any, name: str, token: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
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
