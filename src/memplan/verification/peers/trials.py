"""Measure the peak, time and gradient errors of a step as PyTorch's own memory techniques run it (its peers)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from memplan._bytes import format_bytes
from memplan._json import named
from memplan.errors import UsageError
from memplan.planning.capture.loss_module import default_loss
from memplan.planning.precision_search import lower_precision
from memplan.planning.request import Request
from memplan.verification.measurement import free_memory
from memplan.verification.measurement.peak_alone import measure_trial
from memplan.verification.measurement.peak_and_time import Times, compare_times
from memplan.verification.measurement.state_copies import drawing_random_numbers, isolated
from memplan.verification.measurement.trial import Trial, Work
from memplan.verification.peers.peers import COMPILED, EAGER, Peer, as_peer, blocks_of, peers
from memplan.verification.proof.float64_gradients import GradientErrors, drew_same_numbers, gradient_errors

BUDGETS = (0.8, 0.5, 0.2, 0.0)
"""Values of ``activation_memory_budget``; each takes a compilation."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Measurements of one peer."""

    peer: Peer
    peak: int = 0
    """Bytes, parameters, buffers and inputs included."""
    times: Times | None = None
    """Times of eager mode and of this peer, in alternating pairs."""
    wrong: Mapping[str, float] = field(default_factory=dict)
    """Parameters whose gradient is wrong, with its error as a share of its norm."""
    error: float | None = None
    """Error of all gradients together from float64, as a share of their norm; None if they were not compared."""
    failed: str | None = None
    """The error because of which the peer did not run, if any."""

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
        """Verdict on the gradients, by their errors from float64."""
        if not self.compared:
            return "not compared"
        if self.wrong:
            return "wrong"
        return "lossy" if self.peer.group == "lossy" else "right"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: bytes and seconds."""
        if self.failed is not None:
            return {"name": self.peer.name, "failed": self.failed}
        times = self.times
        return {
            "name": self.peer.name,
            "seconds": None if times is None else times.after,
            "ratio": None if times is None else times.ratio,
            "quartiles": None if times is None else list(times.quartiles),
            **named(self, "peak", "gradients", "error", "wrong"),
        }


@dataclass(frozen=True, slots=True)
class _StepResult:
    """Results of a step from the fixed seed."""

    gradients: Mapping[str, torch.Tensor | None]
    loss: float
    random: bool
    """Whether the step drew random numbers."""


def measure_peers(
    request: Request, eager_peak: int, *, pairs: int = 3, on_start: Callable[[str], None] = lambda _: None
) -> tuple[PeerResult, ...]:
    """Run a step in eager mode, checkpointed per block, by `torch.compile` and under its memory budgets; where lossy
    plans are allowed, under autocast, too.

    Each runs on copies of the module's state, in this process; parameters, gradients and random state do not change.
    ``on_start`` receives the name of each peer before it runs; each is timed ``pairs`` times in turn with eager mode.
    Raises UsageError if there is too little memory to run the step in eager mode, and in float64."""
    # the step in eager mode, and in float64, which takes twice as much
    free, needed = free_memory.available(request.settings.home), 3 * eager_peak
    if free is not None and needed > free:
        raise UsageError(
            f"The peers run the step in eager mode, and in float64, which takes about {format_bytes(needed)}, and "
            f"{format_bytes(free)} are available",
            expected="that much memory",
            do="Leave --peers out, or take smaller inputs",
        )
    with isolated(request.step):
        try:
            return tuple(_PeerRun(request, pairs).run(on_start))
        finally:
            torch.compiler.reset()


class _PeerRun:
    """A call of `measure_peers`."""

    def __init__(self, request: Request, pairs: int) -> None:
        """``pairs``: how many times each peer is timed, in turn with eager mode."""
        self._request, self._pairs, self._home = request, pairs, request.settings.home
        self._blocks = blocks_of(request.step)
        """Repeated blocks, which peers checkpoint."""
        args, kwargs = request.call.rebuild(request.call.tensors)
        self._work = Work(  # with gradients of an earlier micro-batch, if these are held
            args, kwargs, optimizer=request.settings.optimizer, autocast=request.autocast,
            micro_batches=2 if request.settings.gradients.accumulates else 1,
        )  # fmt: skip
        """Inputs, optimizer and number of backward passes of a step."""
        self._float64: dict[str, _StepResult | None] = {}
        """Results in float64, by the name of the peer whose random numbers were drawn."""
        self._yardsticks = {lossy: list[GradientErrors]() for lossy in (False, True)}
        """Errors that other peers may have: of plain autocast for lossy peers, else of eager mode and torch.compile."""

    def run(self, on_start: Callable[[str], None]) -> Sequence[PeerResult]:
        """Run every peer, eager mode first."""
        reference = self._trial(EAGER)
        results = list[PeerResult]()
        random = self._run_step(reference).random
        for peer in peers(blocks=bool(self._blocks), budgets=BUDGETS, autocast=self._lossy_dtype()):
            on_start(peer.name)
            torch.compiler.reset()
            try:
                results.append(self._measure(peer, reference, random))
            except Exception as error:  # compilers and the user's code can raise anything; the others still run
                line = str(error).strip().partition("\n")[0] or "no message"
                results.append(PeerResult(peer, failed=f"{type(error).__name__}: {line}"))
        return results

    def _measure(self, peer: Peer, reference: Trial, random: bool) -> PeerResult:
        """Measure gradient errors, peak and time of a peer, timed in turn with ``reference``. ``random``: whether the
        step draws random numbers: then gradients are compared only if the float64 step drew the same numbers."""
        trial = self._trial(peer)
        result, exact = self._run_step(trial), self._in_float64(peer, random)
        wrong, error, lossy = dict[str, float](), None, peer.group == "lossy"
        if exact is not None and (not random or drew_same_numbers(result.loss, exact.loss, lossy=lossy)):
            errors = gradient_errors(result.gradients, exact.gradients)
            error = errors.relative
            is_plain_autocast = lossy and not peer.checkpointed and not peer.compiled
            if peer in (EAGER, COMPILED) or is_plain_autocast:
                self._yardsticks[lossy].append(errors)
            wrong = errors.exceeding(*self._yardsticks[lossy], lossy=lossy)
        _, peak = measure_trial(trial, self._home)
        return PeerResult(peer, peak, compare_times(reference.seconds, trial.seconds, self._pairs), wrong, error)

    def _lossy_dtype(self) -> torch.dtype | None:
        """Return the autocast dtype of lossy peers. None if there are no such peers: results must stay exact, or the
        step itself runs under autocast, so that all peers do."""
        settings = self._request.settings
        if settings.allow == "exact" or self._request.autocast is not None:
            return None
        return getattr(torch, lower_precision(settings.device, self._home.type))

    def _trial(self, peer: Peer) -> Trial:
        """Return a trial of the step as a peer runs it."""
        step = self._request.step
        call = step if peer == EAGER else as_peer(step, peer, self._blocks, self._home.type)
        return Trial(peer.name, call, step, self._work, updates=self._work.optimizer is not None)

    def _in_float64(self, peer: Peer, random: bool) -> _StepResult | None:
        """Run the step in float64 with the random numbers of this peer, which differ between `torch.compile` and eager
        mode. Return None if the model does not run in float64."""
        source = COMPILED if random and peer.compiled else EAGER
        if source.name not in self._float64:
            try:
                self._float64[source.name] = self._run_in_float64(source)
            except Exception:  # the model's code may name a dtype, or the module may not be copyable
                self._float64[source.name] = None
        return self._float64[source.name]

    def _run_in_float64(self, peer: Peer) -> _StepResult:
        """Run a copy of the step in float64, as a peer runs it, without the optimizer."""
        step: nn.Module = copy.deepcopy(self._request.step).double()
        tensors = [
            tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
            for tensor in self._request.call.tensors
        ]
        args, kwargs = self._request.call.rebuild(tensors)
        work = replace(self._work, inputs=args, kwargs=kwargs, optimizer=None, autocast=None)
        return self._run_step(Trial("float64", as_peer(step, peer), step, work, updates=False))

    def _run_step(self, trial: Trial) -> _StepResult:
        """Run forward and backward of a trial from the fixed seed."""
        with drawing_random_numbers():
            torch.manual_seed(_SEED)
        trial.prepare()
        before = self._random_state()
        trial.gradients_of_step()
        random = not torch.equal(before, self._random_state())
        with torch.no_grad():
            loss = float(default_loss(trial.output))
        return _StepResult(trial.gradients, loss, random)

    def _random_state(self) -> torch.Tensor:
        """Return the state of the generator that the step draws from."""
        return torch.get_rng_state() if self._home.card is None else torch.cuda.get_rng_state(self._home.name)
