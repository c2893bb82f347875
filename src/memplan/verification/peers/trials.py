"""Run the peers of a user's step on this machine: peak, time, and whether their gradients are right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan.errors import UsageError
from memplan.planning.capture.loss_module import default_loss
from memplan.planning.graph.placement import Home
from memplan.planning.precision_search import lower_precision
from memplan.planning.request import Request
from memplan.verification.measurement import free_memory
from memplan.verification.measurement.peak_alone import measured_alone
from memplan.verification.measurement.peak_and_time import Times, compare_times
from memplan.verification.measurement.state_copies import drawing, on_its_own
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.peers.peers import COMPILED, EAGER, Peer, as_peer, blocks_of, peers
from memplan.verification.proof.float64_gradients import GradientErrors, gradient_errors, same_numbers

BUDGETS = (0.8, 0.5, 0.2, 0.0)
"""Values of ``activation_memory_budget``; each is compiled anew."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Measurements of one peer."""

    peer: Peer
    peak: int = 0
    """Bytes, parameters, buffers and inputs included."""
    times: Times | None = None
    """Times beside eager mode, in alternating pairs."""
    wrong: Mapping[str, float] = field(default_factory=dict)
    """Parameters whose gradient is wrong, with its error as a share of its norm."""
    error: float | None = None
    """Error of all gradients together from float64, as a share of their norm; None: they were not compared."""
    failed: str | None = None
    """Error for which it did not run."""

    @property
    def worst(self) -> float | None:
        """Largest error among the wrong gradients, as a share of its norm."""
        return max(self.wrong.values(), default=None)

    @property
    def compared(self) -> bool:
        """Return whether the gradients were compared with float64."""
        return self.error is not None

    @property
    def gradients(self) -> Literal["not compared", "wrong", "lossy", "right"]:
        """Result of comparing them with float64."""
        if not self.compared:
            return "not compared"
        return "wrong" if self.wrong else "lossy" if self.peer.group == "lossy" else "right"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: bytes and seconds."""
        if self.failed is not None:
            return {"name": self.peer.name, "failed": self.failed}
        times = self.times
        return {
            "name": self.peer.name,
            "peak": self.peak,
            "seconds": None if times is None else times.after,
            "ratio": None if times is None else times.ratio,
            "quartiles": None if times is None else list(times.quartiles),
            "gradients": self.gradients,
            "error": self.error if self.error is None or isfinite(self.error) else None,
            "wrong": {name: error if error == error and error != float("inf") else None
                      for name, error in self.wrong.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Seen:
    """Results of one step from the fixed seed."""

    gradients: Mapping[str, torch.Tensor | None]
    loss: float
    random: bool
    """Whether it drew random numbers."""


def measure_peers(
    asked: Request, eager_peak: int, *, pairs: int = 3, told: Callable[[str], None] = lambda _: None
) -> tuple[PeerResult, ...]:
    """Run a step in eager mode, checkpointed per block, by `torch.compile` and under its memory budgets; where lossy
    plans are allowed, under autocast, too.

    Each runs on copies of the module's state, in this process; parameters, gradients and random state do not change.

    Args:
        asked: the request for the step.
        eager_peak: predicted bytes of the step in eager mode.
        pairs: how many times each is timed beside eager mode.
        told: receives the name of each peer before it runs.

    Raises:
        UsageError: there is too little memory to run the step in eager mode, and in float64.
    """
    _check_room(eager_peak, asked.settings.home)
    with on_its_own(asked.step):
        try:
            return tuple(_Peers(asked, pairs).run(told))
        finally:
            torch.compiler.reset()


def _check_room(eager_peak: int, home: Home) -> None:
    free, needed = free_memory.available(home), 3 * eager_peak
    if free is not None and needed > free:
        raise UsageError(
            f"The peers run the step in eager mode, and in float64, which takes about {format_bytes(needed)}, and "
            f"{format_bytes(free)} are available",
            expected="that much memory",
            do="Leave --peers out, or take smaller inputs",
        )


class _Peers:
    """One call of `measure_peers`."""

    def __init__(self, asked: Request, pairs: int) -> None:
        self._asked, self._pairs, self._home = asked, pairs, asked.settings.home
        self._blocks = blocks_of(asked.step)
        args, kwargs = asked.call.rebuild(asked.call.tensors)
        optimizer, held = asked.settings.optimizer, asked.settings.gradients.adds
        self._work = Work(args, kwargs, optimizer=optimizer, autocast=asked.autocast, micro_batches=2 if held else 1)
        self._true: dict[str, _Seen | None] = {}
        """Results in float64, by the peer whose random numbers were drawn."""

    def run(self, told: Callable[[str], None]) -> Sequence[PeerResult]:
        """Run every peer, eager mode first."""
        reference = self._trial(EAGER)
        beside = {lossy: list[GradientErrors]() for lossy in (False, True)}
        found = list[PeerResult]()
        random = self._seen(reference).random
        for peer in peers(blocks=bool(self._blocks), budgets=BUDGETS, autocast=self._lower()):
            told(peer.name)
            torch.compiler.reset()
            try:
                found.append(self._one(peer, reference, random, beside))
            except Exception as error:  # compilers and the user's code can raise anything; the others still run
                first = str(error).strip().partition("\n")[0] or "no message"
                found.append(PeerResult(peer, failed=f"{type(error).__name__}: {first}"))
        return found

    def _one(self, peer: Peer, reference: Trial, random: bool, beside: dict[bool, list[GradientErrors]]) -> PeerResult:
        trial = self._trial(peer)
        seen, true = self._seen(trial), self._in_float64(peer, random)
        wrong, error = dict[str, float](), None
        if true is not None and (not random or same_numbers(seen.loss, true.loss, lossy=peer.group == "lossy")):
            errors = gradient_errors(seen.gradients, true.gradients)
            error = errors.relative
            lossy = peer.group == "lossy"
            if peer in (EAGER, COMPILED) or (lossy and not peer.checkpointed and not peer.compiled):
                beside[lossy].append(errors)  # yardsticks of the others: plain autocast for autocast
            wrong = errors.over(*beside[lossy], lossy=lossy)
        _, peak = measured_alone(trial, self._home)
        return PeerResult(peer, peak, compare_times(reference.seconds, trial.seconds, self._pairs), wrong, error)

    def _lower(self) -> torch.dtype | None:
        """Return autocast's dtype, where lossy peers are allowed."""
        settings = self._asked.settings
        if settings.allow == "exact" or self._asked.autocast is not None:
            return None
        return getattr(torch, lower_precision(settings.device, self._home.type))

    def _trial(self, peer: Peer) -> Trial:
        step = self._asked.step
        call = step if peer == EAGER else as_peer(step, peer, self._blocks, self._home.type)
        return Trial(peer.name, call, step, self._work, updates=self._work.optimizer is not None)

    def _in_float64(self, peer: Peer, random: bool) -> _Seen | None:
        """Run the step in float64 with the random numbers that this peer draws: `torch.compile` draws others than eager
        mode. None where the model does not run in float64.
        """
        of = COMPILED if random and peer.compiled else EAGER
        if of.name not in self._true:
            try:
                self._true[of.name] = self._step_in_float64(of)
            except Exception:  # a dtype that the model's own code names, a module that cannot be copied
                self._true[of.name] = None
        return self._true[of.name]

    def _step_in_float64(self, of: Peer) -> _Seen:
        step: nn.Module = copy.deepcopy(self._asked.step).double()
        tensors = [
            one.detach().double().requires_grad_(one.requires_grad) if one.is_floating_point() else one
            for one in self._asked.call.tensors
        ]
        args, kwargs = self._asked.call.rebuild(tensors)
        work = replace(self._work, inputs=args, kwargs=kwargs, optimizer=None, autocast=None)
        return self._seen(Trial("float64", as_peer(step, of), step, work, updates=False))

    def _seen(self, trial: Trial) -> _Seen:
        with drawing():
            torch.manual_seed(_SEED)
        trial.prepare()
        before = self._random_state()
        trial.gradients_of_step()
        random = not torch.equal(before, self._random_state())
        with torch.no_grad():
            loss = float(default_loss(trial.output))
        return _Seen(trial.gradients, loss, random)

    def _random_state(self) -> torch.Tensor:
        """Return the state of the generator that the step draws from."""
        return torch.get_rng_state() if self._home.card is None else torch.cuda.get_rng_state(self._home.name)
