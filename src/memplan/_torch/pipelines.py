"""Pipeline stages of `torch.distributed.pipelining` on one rank, without the ranks of the other stages.

Everything here was seen in torch 2.13 to 2.15. Private names, of ``torch.distributed.pipelining``:
``schedules._PipelineSchedule._warmup_p2p``, from torch 2.15 on ``_initialize_pipeline_distributed_state``; of
``stage.PipelineStage`` ``_recv_meta``, ``_user_meta``, ``_stage_meta`` and ``_inference_mode``, from torch 2.15 on
``_output_slot_is_releasable``; ``_utils.InferenceMode``, ``_StageForwardMeta``, ``_StageBackwardMeta`` and
``_derive_grad_metas``. Seen in torch 2.11: ``stage.PipelineStage._shape_inference``, with
``stage_index_to_group_rank`` and ``group_rank``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan._torch.patches import patched
from memplan.errors import StepError


@contextlib.contextmanager
def stages_without_neighbours(note_stage: Callable[[Any], None]) -> Iterator[None]:
    """Infer the shapes that neighbouring stages would send to a `PipelineStage` from the stage's own arguments.

    All stages are assumed to be constructed alike: either all with the shapes of their inputs and outputs, or each runs
    its module once to learn them, as torch does in the first step. ``note_stage`` is called with each new stage.
    """
    from torch.distributed.pipelining import _utils as metadata
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    if not hasattr(metadata, "InferenceMode"):  # before torch 2.13
        with _shapes_not_received(PipelineStage):
            yield
        return
    construct = PipelineStage.__init__

    def construct_noted(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        note_stage(self)

    schedule: Any = vars(schedules)["_PipelineSchedule"]
    names = ("_initialize_pipeline_distributed_state", "_warmup_p2p")
    exchange = next(name for name in names if name in vars(schedule))
    begin: Any = vars(schedule)[exchange]
    modes: Any = metadata.InferenceMode

    def begin_without_exchange(self: Any, stages: Sequence[Any], has_backward: bool, connection: bool) -> None:
        """Replace a schedule's exchange with the neighbouring stages before its first step.

        Args:
            connection: of `_warmup_p2p` whether the ranks are connected, of its successor whether to connect them.
        """
        if not all(isinstance(stage, PipelineStage) for stage in stages):
            return begin(self, stages, has_backward, connection)
        runs_module = any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        if exchange != "_warmup_p2p":  # makes groups for pairs of ranks, too, where shapes need not be exchanged
            with patched(modes, needs_dynamic=staticmethod(lambda *_: False)):
                begin(self, stages, has_backward, connection)
        for stage in stages:  # how a stage learns its shapes: it runs its module, or gets them as arguments
            stage._inference_mode = modes.DYNAMIC if runs_module else modes.STATIC

    def received(self: Any, source: int) -> Any:
        """Return the metadata that stage ``source`` would send: of inputs if it comes before, else of gradients."""
        if source < self.stage_index:
            inputs = self._user_meta.inputs
            if inputs is None:
                raise _unknown_inputs(self.stage_index, source)
            return metadata._StageForwardMeta(forward_metas=tuple(map(_differentiable, inputs)))
        gradients = self._user_meta.output_grads or metadata._derive_grad_metas(self._stage_meta.outputs)
        return metadata._StageBackwardMeta(backward_metas=gradients)

    with (
        _fake_outputs_released(PipelineStage),
        patched(schedule, **{exchange: begin_without_exchange}),
        patched(PipelineStage, __init__=construct_noted, _recv_meta=received),
    ):
        yield


@contextlib.contextmanager
def _fake_outputs_released(stage_class: Any) -> Iterator[None]:
    """Let stages release the fake outputs that they sent, as they release plain tensors: torch asks for the type."""
    is_releasable: Any = getattr(stage_class, "_output_slot_is_releasable", None)
    if is_releasable is None:  # before torch 2.15 outputs stay until backward
        yield
        return
    plain = torch.Tensor()

    def is_releasable_if_plain(self: Any, output: Any) -> tuple[bool, str]:
        return is_releasable(self, plain if type(output) is FakeTensor else output)

    with patched(stage_class, _output_slot_is_releasable=is_releasable_if_plain):
        yield


@contextlib.contextmanager
def _shapes_not_received(stage_class: Any) -> Iterator[None]:
    """Refuse stages that would receive the shapes of their inputs from another rank, as torch 2.11 exchanges them."""
    infer: Any = vars(stage_class).get("_shape_inference")
    if infer is None:
        yield
        return

    def infer_without_exchange(self: Any, args: Any, kwargs: Any = None) -> Any:
        """Infer a stage's shapes, unless the stage before it is on another rank."""
        source = self.stage_index - 1
        if not self.is_first and self.stage_index_to_group_rank[source] != self.group_rank:
            raise _unknown_inputs(self.stage_index, source)
        return infer(self, args, kwargs)

    with patched(stage_class, _shape_inference=infer_without_exchange):
        yield


def _unknown_inputs(stage: int, source: int) -> StepError:
    """Return the error to raise for a stage whose inputs have shapes that only another stage's rank knows."""
    return StepError(
        f"stage {stage} of the pipeline learns the shapes of its inputs from stage {source}, of another rank",
        expected="stages that are described by themselves, as one rank is recorded",
        do="Give PipelineStage its input_args (tensors on meta have shapes, too), or record rank 0",
    )


def _differentiable(meta: Any) -> Any:
    return replace(meta, requires_grad=meta.dtype.is_floating_point)
