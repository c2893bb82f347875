"""Fit a model that `fully_shard` sharded: each of its innermost sharded modules (a block) runs by a plan of its own.

A block's plan runs between the hooks of `fully_shard`, on the gathered parameters: it recomputes no collective. A block
whose call has no graph, as under tensor parallelism, gets a selective checkpoint instead, which saves the results of
collectives. The other layers and the loss run as written. Blocks are planned to hold less between the passes, until the
rank's measured peak keeps the budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.errors import BudgetError, MemplanError, UsageError, VerificationError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import Call
from memplan.planning.capture.loss_module import default_loss
from memplan.planning.cost.optimizer_memory import Update, update_of
from memplan.planning.graph.precision import EXACT
from memplan.planning.graph.roofline import CPU, rates_of
from memplan.planning.levers.lever import KEPT_UNTIL_UPDATE
from memplan.planning.plan.plan import Plan
from memplan.planning.planner import Planner
from memplan.planning.relative_budget import Relative
from memplan.planning.request import Request
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule, schedule
from memplan.planning.settings import PlanOptions, Settings
from memplan.planning.study import Planned, Study
from memplan.rewriting.calls import Calls
from memplan.rewriting.install import Installed, install
from memplan.rewriting.selective_checkpoint import (
    CheckpointedCall,
    CheckpointOp,
    CheckpointPlan,
    checkpoint_selectively,
    logged_calls,
)
from memplan.verification.fitting.fitted import Fitted
from memplan.verification.fitting.plan_cache import Plans, warn
from memplan.verification.fitting.ranks import fingerprint, refuse_differing, together
from memplan.verification.measurement.peak_alone import peak_growth
from memplan.verification.measurement.peak_and_time import storage_bytes
from memplan.verification.measurement.state_copies import RandomState, copy_tensors, training_context
from memplan.verification.proof.differences import Compared, difference
from memplan.verification.proof.proof import Proof, nothing_compared

_ATTEMPTS = 5
"""Number of plans to try, each holding less, until a measured peak keeps the budget."""


def is_sharded(model: Any) -> bool:
    """Return whether a model has parameters that are sharded between ranks."""
    return isinstance(model, nn.Module) and any(map(_torch.is_distributed, model.parameters()))


def fit_sharded(request: Request, options: PlanOptions) -> Fitted:
    """Fit a sharded model. Every rank of the default process group calls it, as each run gathers parameters.

    Raises:
        UsageError: the options or the kind of sharding are not supported, or ranks have different blocks.
        BudgetError: no plan of the blocks was measured within the budget on every rank.
        VerificationError: a gradient differs from that of the step without a plan.
    """
    blocks = _torch.sharded_modules(request.model) or _torch.repeated_blocks(request.model)
    _refuse(request.model, blocks, options)
    fitting = _Fitting(request, blocks)
    try:
        with training_context():
            return fitting.run()
    except BaseException:
        fitting.undo.close()
        raise


def _refuse(model: nn.Module, blocks: dict[str, nn.Module], options: PlanOptions) -> None:
    """Raise UsageError for sharding and options that blocks cannot be planned with."""
    if not _torch.has_process_group():
        raise UsageError(
            "The model's parameters are DTensors, and there is no process group",
            expected="the group that they were sharded in, in which the step runs",
            do="Call memplan.fit before destroy_process_group()",
        )
    if not blocks:
        name = next(name for name, parameter in model.named_parameters() if _torch.is_distributed(parameter))
        raise UsageError(
            f"{name} is a DTensor of a model without blocks",
            expected="modules that fully_shard wrapped, or layers of one class in a ModuleList or Sequential",
            do="Wrap the blocks by fully_shard, or checkpoint parts of the model by torch.utils.checkpoint",
        )
    unsupported = {
        "early=True": options.gradients.updates_early,
        f"allow={options.allow!r}": options.allow != "exact",
        "engine='inductor'": options.engine == "inductor",
        "plan": options.plan is not None,
    }
    used = ", ".join(name for name, is_used in unsupported.items() if is_used)
    if used:
        raise UsageError(f"{used} with a sharded model", expected="an exact plan by torch's kernels", do="Leave it out")


@dataclass
class _Kind:
    """Blocks whose calls have the same graph."""

    study: Study
    names: list[str] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """Bytes that a block saves for the backward pass without a plan."""
        return _saved_bytes(schedule(self.study.captured.graph, Choices()))


@dataclass
class _CheckpointedKind:
    """Blocks without a graph whose calls run the same ops."""

    call: CheckpointedCall
    names: list[str] = field(default_factory=list)

    @property
    def saved(self) -> int:
        """Bytes that a block holds between the passes without a checkpoint."""
        return self.call.saved


@dataclass(frozen=True)
class _BlockPlan:
    """The plan of a kind of block."""

    planned: Planned
    budget: int
    """Bytes for the block alone, parameters and gradients included."""
    loss_bytes_ratio: Fraction
    """Limits what the block holds between the passes."""


@dataclass(frozen=True)
class _Ran:
    """Results of a step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random: RandomState
    growth: int
    """Peak bytes of forward and backward above those before; 0 where it was not measured."""


class _Fitting:
    """A call of `fit` with a sharded model."""

    def __init__(self, request: Request, blocks: dict[str, nn.Module]) -> None:
        """Compute the bytes of this rank's shards: of weights, their gradients and optimizer state."""
        self._request, self._blocks = request, blocks
        self._adds, optimizer = request.settings.gradients.accumulates, request.settings.optimizer
        """Whether gradients exist when a step begins, and are added to."""
        # Blocks are planned without the optimizer's update and earlier gradients: these are shards, outside of blocks.
        self._settings = replace(request.settings, optimizer=None, gradients=KEPT_UNTIL_UPDATE)
        self._notes = list(request.notes)
        self.undo = ExitStack()
        """Uninstalls the current plans."""
        self._handed_over = False
        """Whether the user has the model."""
        trained_shards = [_torch.local(p) for p in request.model.parameters() if p.requires_grad]
        self._gradient_bytes = storage_bytes(trained_shards, self._settings.home.type)
        """Of this rank's shards."""
        self._update = Update(state_bytes=0, peak_bytes=0)
        """Bytes of the optimizer's state and update for these shards."""
        if optimizer is not None:
            layouts = [(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")) for t in trained_shards]
            self._update = update_of(optimizer, layouts, self._settings.home)
        shards = map(_torch.local, request.model.parameters())
        tensors = (*shards, *request.model.buffers(), *request.call.tensors)
        self._resident = storage_bytes(tensors, self._settings.home.type) + self._update.state_bytes
        """Bytes that stay allocated outside of blocks: shards, buffers, inputs, optimizer state, kept gradients."""
        if self._adds:
            self._resident += self._gradient_bytes

    def run(self) -> Fitted:
        """Measure the step without plans, then plan all blocks to hold less, until the measured peak fits."""
        kinds, checkpointed = self._kinds()
        reference = self._step(measured=True)
        unplanned = self._peak(reference)
        budget = self._request.budget
        if isinstance(budget, Relative):
            self._notes.append(f"the budget is {format_bytes(budget.of(unplanned))}: {budget.describe(unplanned)}")
            budget = budget.of(unplanned)
        less, lowest = unplanned - budget, unplanned
        saved = sum(kind.saved * len(kind.names) for kind in (*kinds, *checkpointed))
        for _ in range(_ATTEMPTS):
            share = Fraction(max(0, less), saved or 1)
            plans = [self._plan(kind, int(share * kind.saved)) for kind in kinds]
            checkpoints = [self._checkpoint(kind, int(share * kind.saved)) for kind in checkpointed]
            graph_plans = [block_plan.planned.plan for block_plan in plans]
            plan: Any = max(graph_plans, key=lambda plan: plan.eager_peak) if graph_plans else checkpoints[0]
            if less <= 0:
                self._notes.append("it fits already: nothing is changed")
                proof = self._proof(
                    reference=reference, ran=reference, unplanned=unplanned, peak=unplanned, budget=budget
                )
                return Fitted(
                    self._request.model, self._loss, plan, proof, changed=False, optimizer=None, notes=self._notes
                )
            calls = self._install(kinds, plans, checkpointed, checkpoints)
            self._step(measured=False)  # captures each block
            ran = self._step(measured=True)
            peak = self._peak(ran)
            proof = self._proof(reference, ran, unplanned, peak, budget)
            self._refuse_differences(proof)
            lowest = min(lowest, peak)
            if peak <= budget:
                self._note_plans(kinds, plans, checkpointed, checkpoints)
                return self._hand_over(plan, proof, calls)
            self.undo.close()
            less += peak - budget
        raise BudgetError(
            f"The budget is {format_bytes(budget)}, and the step with planned blocks was measured above it",
            expected=f"at least {format_bytes(lowest)}, at which it ran",
            do=f"Give {format_bytes(lowest)} ({lowest} bytes), or call fully_shard on more layers: only the innermost "
            "sharded modules are planned",
            smallest_budget=lowest,
        )

    @property
    def _loss(self) -> nn.Module | None:
        """The module of model and loss; None if no loss was given."""
        return None if self._request.step is self._request.model else self._request.step

    # -- running the step

    def _step(self, *, measured: bool) -> _Ran:
        """Run forward and backward, and measure the peak if ``measured``. Gradients, buffers and random streams are as
        before afterwards."""
        request, model = self._request, self._request.model
        args, kwargs = request.call.rebuild(copy_tensors(request.call.tensors))
        before = [(parameter, parameter.grad) for parameter in model.parameters()]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        losses: list[torch.Tensor] = []

        def run() -> None:
            """Run forward and backward, and note the loss."""
            with request.under_autocast():
                loss = default_loss(request.step(*args, **kwargs))
            loss.backward()
            losses.append(loss.detach())

        random = RandomState.now()
        try:
            for parameter, _ in before:
                parameter.grad = None
            growth = 0
            if measured:
                growth = peak_growth(run, self._settings.home)
            else:
                run()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            shards = {name: None if g is None else _torch.local(g).clone() for name, g in gradients.items()}
            buffers_after = {name: buffer.clone() for name, buffer in model.named_buffers()}
            return _Ran(losses[0], shards, buffers_after, RandomState.now(), growth)
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            random.restore()

    def _peak(self, ran: _Ran) -> int:
        """Return the highest peak on any rank of a step and its update, in bytes. Every rank calls this."""
        update = self._update.peak_bytes + (0 if self._adds else self._gradient_bytes)
        return max(_torch.gathered(self._resident + max(ran.growth, update)))

    # -- plans

    def _kinds(self) -> tuple[list[_Kind], list[_CheckpointedKind]]:
        """Capture every block in a step, on its gathered parameters, and group those with equal graphs; the others by
        their ops. Raises UsageError if no block can be planned, or ranks have different graphs."""
        kinds: dict[str, _Kind] = {}
        """By fingerprint of the graph."""
        reasons: dict[str, str] = {}
        """Why a block cannot be planned, by its name."""

        def capturing_planner(name: str, block: nn.Module) -> Callable[[Call, bool], None]:
            """Return a planner that captures a block's call and lets it run unplanned."""

            def capture_call(call: Call, accumulate: bool) -> None:
                """Capture a call, and add the block to its kind, or note why it cannot be planned."""
                try:
                    graph = capture(block, call, EXACT)
                    kind = kinds.get(graph.graph.fingerprint)
                    if kind is None:
                        study = Planner(block).study(call, self._settings, captured=graph)
                        kind = kinds[graph.graph.fingerprint] = _Kind(study)
                    kind.names.append(name)
                except MemplanError as error:  # raised within the hooks of fully_shard, it would leave weights gathered
                    reasons[name] = str(error)

            return capture_call

        installed_by_name: dict[str, Installed] = {}
        with ExitStack() as undo, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # calls that cannot be planned warn; `reasons` has why
            for name, block in self._blocks.items():
                installed = installed_by_name[name] = install(block, capturing_planner(name, block))
                undo.callback(installed.undo)
            self._step(measured=False)
        for name, installed in installed_by_name.items():
            why = installed.calls.stats().why
            if why:
                reasons[name] = "; ".join(why)
        checkpointed = self._checkpointed_kinds(reasons)
        error = None
        if not kinds and not checkpointed:
            error = UsageError(
                "No block of the sharded model can be planned" + "".join(f": {text}" for text in reasons.values()),
                expected="blocks whose call is traced",
                do="Wrap the blocks by fully_shard, each by itself, and then the model",
            )
        together(result=None, error=error)  # raises in all ranks if any has an error
        graphs = [*kinds, *(kind.call.fingerprint for kind in checkpointed)]
        refuse_differing(_torch.gathered(" ".join(graph[:12] for graph in graphs)))
        return list(kinds.values()), checkpointed

    def _checkpointed_kinds(self, reasons: dict[str, str]) -> list[_CheckpointedKind]:
        """Log the ops of the blocks without a graph in a step, and group those that run the same ops.

        ``reasons``: why the blocks have no graph, by name.
        """
        parallel = "DTensor", "AsyncCollectiveTensor"
        lowered = {name: reason for name, reason in reasons.items() if any(kind in reason for kind in parallel)}
        # other blocks may do what must not happen twice in a step, such as counting calls
        self._notes += [
            f"{name} runs as it is written: {reason}" for name, reason in reasons.items() if name not in lowered
        ]
        if not any(_torch.gathered(bool(lowered))):  # the step below is one of all ranks
            return []
        if "" in lowered and (blocks := _torch.repeated_blocks(self._request.model)):
            # a checkpoint of the whole model would hold all its activations at once in the backward pass
            self._blocks |= blocks
            lowered = dict.fromkeys(blocks, lowered[""])
        card = self._settings.home.card
        with ExitStack() as stack:
            logs = {
                name: stack.enter_context(logged_calls(self._blocks[name], CPU if card is None else rates_of(card)))
                for name in lowered
            }
            self._step(measured=False)
        kinds: dict[tuple[tuple[CheckpointOp, ...], int], _CheckpointedKind] = {}
        for name, calls in logs.items():
            obstacle = calls[0].obstacle if len(calls) == 1 else f"it is called {len(calls)} times in a step"
            if obstacle:
                self._notes.append(f"{name} runs as it is written: {lowered[name]}; no checkpoint, as {obstacle}")
            else:
                key = calls[0].ops, calls[0].saved
                kinds.setdefault(key, _CheckpointedKind(calls[0])).names.append(name)
        for kind in kinds.values():
            names = ", ".join(kind.names)
            self._notes.append(f"{names}: a checkpoint, as a call that computes with DTensors has no graph")
        return list(kinds.values())

    def _checkpoint(self, kind: _CheckpointedKind, less: int) -> CheckpointPlan:
        """Return rank 0's choice of what blocks save, each ``less`` bytes less than without a checkpoint."""
        return together(result=kind.call.plan(kind.saved - less), error=None)[0]

    def _plan(self, kind: _Kind, less: int) -> _BlockPlan:
        """Return rank 0's plan of a kind of block, for all ranks.

        ``less``: bytes that each block is to save less for the backward pass than without a plan.
        """
        result = error = None
        if _torch.ranks()[0] == 0:
            try:
                planned, budget, loss_bytes_ratio = self._plan_alone(kind.study, less)
                result = planned.plan, budget, loss_bytes_ratio
            except MemplanError as failed:
                error = failed
        of_rank_0 = together(result, error)[0]
        assert of_rank_0 is not None, "rank 0 has a plan or an error"
        plan, budget, loss_bytes_ratio = of_rank_0
        # each rank applies the decisions of rank 0's plan to its own capture of the block
        planned = _planned_under_load(kind.study, replace(self._settings, plan=plan), budget, loss_bytes_ratio)
        return _BlockPlan(planned, budget, loss_bytes_ratio)

    def _plan_alone(self, study: Study, less: int) -> tuple[Planned, int, Fraction]:
        """Plan a block to save ``less`` bytes less for the backward pass, and to peak as much lower, if it can.

        A load that is assumed between the block's passes (`Settings.loss_bytes_ratio`) limits the bytes that the plan
        saves.

        Returns:
            The plan, its budget in bytes, and the load: bytes for each byte of the tangents, the gradients of the
            block's outputs.
        """
        settings, graph = self._settings, study.captured.graph
        tangents = sum(value.bytes for value in graph.values if value.kind == "tangent")
        counted = levels(schedule(graph, Choices()), study.search(settings).outside_memory)
        between = counted.backward[0]  # live as the gradients of the outputs arrive
        error = None
        for budget in (counted.peak - less, counted.peak):
            ratio = Fraction(max(0, budget - between + less), tangents or 1)
            try:
                return _planned_under_load(study, settings, budget, ratio), budget, ratio
            except BudgetError as failed:
                error = failed
        assert error is not None
        budget = error.smallest_budget
        return _planned_under_load(study, settings, budget, ratio), budget, ratio

    def _install(
        self,
        kinds: list[_Kind],
        plans: list[_BlockPlan],
        checkpointed: list[_CheckpointedKind],
        checkpoints: list[CheckpointPlan],
    ) -> list[Calls]:
        """Make the calls of all blocks run as planned, until ``undo`` is closed. Returns their counts."""
        self.undo, calls = ExitStack(), list[Calls]()
        for kind, plan in zip(kinds, plans, strict=True):
            for name in kind.names:
                settings = replace(self._settings, loss_bytes_ratio=plan.loss_bytes_ratio)
                planner = Plans(self._blocks[name], settings, plan.budget, self._notify)
                planner.plans.append(plan.planned)
                planner.handed_over = True
                installed = install(self._blocks[name], planner)
                self.undo.callback(installed.undo)
                calls.append(installed.calls)
        for kind, plan in zip(checkpointed, checkpoints, strict=True):
            for name in kind.names:
                counts = Calls()
                self.undo.callback(checkpoint_selectively(self._blocks[name], plan, counts))
                calls.append(counts)
        return calls

    def _notify(self, text: str) -> None:
        """Add a note that a call was planned anew, and warn, once the user has the model."""
        if self._handed_over:
            self._notes.append(text)
            warn(text)

    # -- results

    def _proof(self, reference: _Ran, ran: _Ran, unplanned: int, peak: int, budget: int) -> Proof:
        """Compare a planned step with the unplanned one. ``unplanned``, ``peak``: measured peaks of both, in bytes."""
        return replace(
            nothing_compared(), steps=1, micro_batches=1, optimizer="no update",
            outputs=_compare({"the loss": reference.loss}, {"the loss": ran.loss}),
            gradients=_compare(reference.gradients, ran.gradients),
            buffers=_compare(reference.buffers, ran.buffers),
            random_streams=reference.random.differences(ran.random), resident=self._resident, peak=peak,
            reference_peak=unplanned, budget=budget, torch=torch.__version__,
        )  # fmt: skip

    def _refuse_differences(self, proof: Proof) -> None:
        """Raise VerificationError in every rank if a result differs on any."""
        error = None
        if not proof.same:
            error = VerificationError(
                f"The step with planned blocks is {str(proof).splitlines()[0]}",
                expected="the step without a plan, bit for bit",
                do="The model is as before. Please report this; a step that differs from run to run cannot be proven",
                proof=proof,
            )
        together(result=None, error=error)  # raises in all ranks if any has an error

    def _note_plans(
        self,
        kinds: list[_Kind],
        plans: list[_BlockPlan],
        checkpointed: list[_CheckpointedKind],
        checkpoints: list[CheckpointPlan],
    ) -> None:
        """Note each kind's plan, or raise UsageError if ranks differ in one."""
        fingerprints = [fingerprint(block_plan.planned.plan) for block_plan in plans]
        of_checkpoints = [plan.fingerprint for plan in checkpoints]
        refuse_differing(_torch.gathered(" ".join((*fingerprints, *of_checkpoints))))
        for kind, block_plan, text in zip(kinds, plans, fingerprints, strict=True):
            names = ", ".join(name or "the model" for name in kind.names)
            saved = format_bytes(_saved_bytes(block_plan.planned.schedule))
            self._notes.append(
                f"{names}: plan {text} on all ranks, which saves {saved} for backward in each instead of "
                f"{format_bytes(kind.saved)}; layers outside of them run as they are written"
            )
        for kind, plan in zip(checkpointed, checkpoints, strict=True):
            names = ", ".join(name or "the model" for name in kind.names)
            self._notes.append(f"{names}: plan {plan.fingerprint} on all ranks. {plan.summary}")

    def _hand_over(self, plan: Plan, proof: Proof, calls: list[Calls]) -> Fitted:
        """Return the result with the plans installed; calls count from now on."""
        for counts in calls:
            counts.restart()
        self._handed_over = True
        return Fitted(
            self._request.model, self._loss, plan, proof, changed=True, optimizer=None, notes=self._notes,
            _undo=self.undo, _calls=calls,
        )  # fmt: skip


def _planned_under_load(study: Study, settings: Settings, budget: int, loss_bytes_ratio: Fraction) -> Planned:
    """Plan a captured block as if ``loss_bytes_ratio`` bytes for each byte of its tangents were allocated between its
    passes. ``study`` is of the block without such a load, which its cached results do not take into account."""
    fresh = Study(study.model, study.call, study.captured)
    return fresh.planned(replace(settings, loss_bytes_ratio=loss_bytes_ratio), budget)


def _saved_bytes(planned: Schedule) -> int:
    """Return the bytes that a schedule saves for the backward pass."""
    return sum(planned.graph.values[value].bytes for value in planned.saved)


def _compare(reference: dict[str, Any], candidate: dict[str, Any]) -> Compared:
    """Compare the tensors of two steps bit for bit, by name."""
    differences = [difference(name, 0, tensor, candidate[name]) for name, tensor in reference.items()]
    return Compared(len(differences), tuple(filter(None, differences)))
