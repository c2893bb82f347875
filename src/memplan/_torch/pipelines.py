"""Stages of a pipeline without the ranks of the other stages.

Everything here was seen in torch 2.13. Private names, of ``torch.distributed.pipelining``:
``schedules._PipelineSchedule._warmup_p2p``; of ``stage.PipelineStage`` ``_recv_meta``, ``_user_meta``, ``_stage_meta``
and ``_inference_mode``; ``_utils._StageForwardMeta``, ``_StageBackwardMeta`` and ``_derive_grad_metas``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from memplan._torch.patches import patched
from memplan.errors import StepError


@contextlib.contextmanager
def stages_alone(made: Callable[[Any], None]) -> Iterator[None]:
    """Let a `PipelineStage` find what its neighbours would send of their shapes in its own arguments.

    Stages of other ranks are assumed to be described as this rank's are: either all give the shapes of their inputs and
    outputs, or each runs its module once to learn them, as torch does in the first step. ``made`` gets each stage.
    """
    from torch.distributed.pipelining import _utils as metadata
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import PipelineStage

    if not hasattr(metadata, "InferenceMode"):  # before torch 2.13
        yield
        return
    construct = PipelineStage.__init__

    def construct_noted(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        made(self)

    schedule: Any = vars(schedules)["_PipelineSchedule"]
    begin: Any = vars(schedule)["_warmup_p2p"]

    def begin_alone(self: Any, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
        if not all(isinstance(stage, PipelineStage) for stage in stages):
            return begin(self, stages, has_backward, p2p_done)
        modes = metadata.InferenceMode
        runs = any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        for stage in stages:
            stage._inference_mode = modes.DYNAMIC if runs else modes.STATIC

    def received(self: Any, source: int) -> Any:
        """Return what the stage ``source`` would send: inputs from the one before, gradients from the one behind."""
        if source < self.stage_index:
            inputs = self._user_meta.inputs
            if inputs is None:
                raise StepError(
                    f"stage {self.stage_index} of the pipeline learns the shapes of its inputs from stage {source}, of "
                    "another rank",
                    expected="stages that are described by themselves, as one rank is recorded",
                    do="Give PipelineStage its input_args (tensors on meta have shapes, too), or record rank 0",
                )
            return metadata._StageForwardMeta(forward_metas=tuple(map(_differentiable, inputs)))
        gradients = self._user_meta.output_grads or metadata._derive_grad_metas(self._stage_meta.outputs)
        return metadata._StageBackwardMeta(backward_metas=gradients)

    with (
        patched(schedule, _warmup_p2p=begin_alone),
        patched(PipelineStage, __init__=construct_noted, _recv_meta=received),
    ):
        yield


def _differentiable(meta: Any) -> Any:
    """Return an input's description as the stage before sends it: results of its weights require a gradient."""
    return replace(meta, requires_grad=meta.dtype.is_floating_point)
