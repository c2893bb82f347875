"""Which storages are weights, buffers, gradients or optimizer states, by their owners while a step is recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from memplan import _torch
from memplan.trace.recording.ledger import Ledger, Note
from memplan.trace.recording.place import Place, format_frame, user_frame
from memplan.trace.records import BackwardPass


class Ownership:
    """Registers storages as weights, buffers, gradients and optimizer states, which their ops do not show.

    Storages are identified by their ledger entries.
    """

    def __init__(self, place: Place, ledger: Ledger, notes: Sequence[Note]) -> None:
        """Begin without storages, which are identified by their ids in the ledger. ``notes``: the ops so far."""
        self.weights: dict[int, str] = {}
        """Storage -> name of the parameter in its module."""
        self.buffers: dict[int, str] = {}
        """Storage -> name of the buffer in its module."""
        self.gradients: dict[int, int] = {}
        """Gradient -> its weight."""
        self.graded: set[int] = set()
        """Weights that had a gradient. Several gradients can share a storage, so `gradients` may have fewer weights."""
        self.states: set[int] = set()
        """Tensors of optimizer states."""
        self.found_inf: set[int] = set()
        """Flags of a GradScaler for gradients that overflowed."""
        self.workspaces: set[int] = set()
        """Storages that are a library's workspaces."""
        self.updating: set[int] = set()
        """Gradients and tensors computed from them since the last backward pass."""
        self.unowned: list[weakref.ref[nn.Parameter]] = []
        """Parameters that an op read before they were seen in a module or optimizer."""
        self.optimized: set[int] = set()
        """Weights that optimizers update and that require a gradient."""
        self.passes: list[BackwardPass] = []
        """All backward passes so far."""
        self._place = place
        self._ledger = ledger
        self._notes = notes
        place.on_backward = self._begin_backward

    def mark_gradients(self) -> None:
        """Register the present gradients of all parameters."""
        for reference in self.unowned:
            self._mark_gradient(reference())
        for module in self._place.live_modules():
            for parameter in module.parameters(recurse=False):
                self._mark_gradient(parameter)
        for parameter in self._place.optimizer_parameters():
            self._mark_gradient(parameter)

    def mark_modules(self) -> None:
        """Register the present parameters and buffers of all modules."""
        for module in self._place.live_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                for inner in _torch.inner_tensors(parameter).values():
                    self.add(self.weights, inner, name)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                self.add(self.buffers, buffer, name)

    def add(self, names: dict[int, str], tensor: torch.Tensor | None, name: str) -> None:
        """Add a tensor's storage to ``names``, unless it has a name there."""
        if tensor is not None and _torch.has_shape(tensor):
            names.setdefault(self._ledger.entry(tensor, op=None).id, name)

    def _mark_gradient(self, parameter: torch.Tensor | None) -> None:
        """Register the storages of a parameter's ``.grad``, if there is one."""
        if parameter is None or not parameter.is_leaf or parameter.grad is None:
            return
        weight = self._ledger.find(parameter)
        if weight is None:
            return
        self.graded.add(weight.id)
        gradient = parameter.grad
        if gradient.layout != torch.strided:
            for indices in self._ledger.parts(gradient, op=None)[:-1]:
                # a sparse gradient may share its indices with the input
                if indices.op is not None and self._notes[indices.op].phase == "backward":
                    self.gradients[indices.id] = weight.id
        values = self._ledger.find(gradient)
        if values is not None:
            self.gradients[values.id] = weight.id
            self.updating.add(values.id)

    def before_update(self) -> None:
        """Register the parameters that optimizers are about to update, and their gradients."""
        for parameter in self._place.optimizer_parameters():
            self.add(self.weights, parameter, name="")
            weight = self._ledger.find(parameter)
            if weight is not None and parameter.requires_grad:
                self.optimized.add(weight.id)
        self.mark_gradients()

    def _begin_backward(self, graph_flag: _torch.GraphFlag) -> Callable[[], None]:
        """Return the callback for the end of this backward pass. ``graph_flag``: the flag that keeps its graph."""
        step, start, nested = self._place.step, self._ledger.clock, _torch.in_backward()
        where = format_frame(user_frame())

        def end() -> None:
            self.passes.append(BackwardPass(step, start, self._ledger.clock, graph_flag, nested, where))

        return end

    def mark_states(self) -> None:
        """Register the tensors of optimizer states."""
        for optimizer in self._place.live_optimizers():
            for state in optimizer.state.values():
                tensors = [leaf for leaf in _torch.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
                for tensor in tensors:
                    entries = map(self._ledger.find, _torch.inner_tensors(tensor).values())
                    self.states.update(entry.id for entry in entries if entry is not None)
