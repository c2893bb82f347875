"""The contents of an export: tensors in RAM and in flash, and the two passes that run on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from memplan.errors import InputError
from memplan.exporting.arena.lifetimes import Lifetimes
from memplan.exporting.arena.offsets import Placement
from memplan.exporting.kernels.frozen_weights import Quantized
from memplan.exporting.lowering.byte_inputs import BYTES, inputs_with_normalized_buffer
from memplan.exporting.lowering.device_graph import ARENA_INPUT, WORD, DeviceGraph, first_output, rounded_to_words
from memplan.exporting.optimizer_rules import UpdateRules
from memplan.planning.request import Request
from memplan.planning.schedule.scheduler import Schedule


def tensors_of(request: Request) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in the user's model. Names of the loss begin with ``(loss)``.

    Raises:
        InputError: a tensor of the model has the name of one of the loss.
    """
    named = [*request.step.named_parameters(), *request.step.named_buffers()]
    tensors = {path if request.step is request.model else name_of(path): tensor for path, tensor in named}
    if len(tensors) < len(named):
        raise InputError(
            "A tensor of the model is named as one of the loss", expected="names of their own", do="Rename"
        )
    return tensors


def name_of(path: str) -> str:
    """Return the name in the user's model of a tensor of the module that wraps model and loss."""
    return path.removeprefix("model.") if path.startswith("model.") else path.replace("loss.", "(loss).", 1)


TARGET, INPUT = "y", "x"
"""First letters of the names of C arguments: targets of the loss, and inputs of the model."""


@dataclass(frozen=True, slots=True)
class PersistentTensor:
    """A tensor that lives from step to step, or an output of the model."""

    path: str
    """Name in the model, or in its output."""
    shape: tuple[int, ...]
    offset: int
    """Elements of tensors of the same kind before it."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def one_after_another(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[PersistentTensor, ...]:
    """Lay out tensors of these names and shapes one after another."""
    layout, offset = list[PersistentTensor](), 0
    for path, shape in tensors:
        layout.append(PersistentTensor(path, shape, offset))
        offset += layout[-1].size
    return tuple(layout)


@dataclass(frozen=True)
class Memory:
    """Tensors that live from step to step, by where they lie."""

    trained: tuple[PersistentTensor, ...]
    """In RAM: parameters that are updated."""
    statistics: tuple[PersistentTensor, ...]
    """In RAM: buffers that change, such as running statistics."""
    frozen: tuple[PersistentTensor, ...]
    """In flash, in float32."""
    initial_values: Mapping[str, np.ndarray]
    """Initial elements in float32 of each tensor, by name."""
    int8: tuple[PersistentTensor, ...] = ()
    """In flash, as int8."""
    scales: tuple[PersistentTensor, ...] = ()
    """The scales of int8 weights under the weights' names: in flash, in float32."""
    trained_int8: tuple[PersistentTensor, ...] = ()
    """In RAM, as int8: parameters that are updated."""
    quantized: Mapping[str, Quantized] = field(default_factory=dict)
    """Int8 elements and scales, by name."""

    @property
    def weights(self) -> tuple[PersistentTensor, ...]:
        """Tensors that `get_weights` writes, in its order."""
        return (*self.trained, *self.trained_int8, *self.statistics)

    def elements(self, kind: str) -> int:
        """Return the number of elements of one kind: trained, trained_int8, statistics, frozen, scales or int8."""
        return sum(tensor.size for tensor in getattr(self, kind))

    @property
    def flash_bytes(self) -> int:
        """Bytes of initial values and frozen weights."""
        floats = ("trained", "statistics", "frozen", "scales")
        return 4 * sum(map(self.elements, floats)) + self.elements("int8") + self.elements("trained_int8")


@dataclass(frozen=True)
class Pass:
    """The schedule of one C function, and where its values lie."""

    device: DeviceGraph
    schedule: Schedule
    lifetimes: Lifetimes
    placement: Placement
    inputs: Mapping[int, str]
    """By input value: the name of its C argument."""

    @property
    def parameters(self) -> str:
        """C declarations of the inputs and targets."""
        return self._declared(self.inputs.values())

    @property
    def arena_input(self) -> tuple[int, int, int] | None:
        """The input that lies in the arena, its offset in bytes and its bytes; None if none does."""
        for time, action in enumerate(self.schedule.forward):
            op = None if action.op is None else action.called_op(self.schedule.graph)
            if op is not None and op.target == ARENA_INPUT:
                source: int = op.args[0].value
                output = first_output(op)
                buffer = self.lifetimes.buffer_of[time][output]
                return source, self.placement.offsets[buffer], self.schedule.graph.values[output].bytes
        return None

    @property
    def model_inputs(self) -> list[str]:
        """Names of the C arguments that are no targets."""
        return [name for name in self.inputs.values() if not name.startswith(TARGET)]

    @property
    def model_parameters(self) -> str:
        """C declarations of the inputs without targets."""
        return self._declared(self.model_inputs)

    def _declared(self, names: Collection[str]) -> str:
        return ", ".join(f"const {self.c_type(v)} *{name}" for v, name in self.inputs.items() if name in names)

    def c_type(self, value: int) -> str:
        """Return the C type of the elements of an input."""
        dtype = self.device.graph.values[value].dtype
        return "float" if dtype == "float32" else f"{dtype}_t"


def state_members(memory: Memory, rules: UpdateRules) -> tuple[tuple[str, int], ...]:
    """Return the members of the state struct without pointers, and the number of elements of four bytes each."""
    trained = memory.elements("trained")
    counts = {
        "weights": trained,
        "int8": rounded_to_words(memory.elements("trained_int8")) // WORD,
        **dict.fromkeys(rules.arrays_in_state, trained),
        "statistics": memory.elements("statistics"),
        "correction": rules.bias_correction_count,
        "rate": 1,
        "rates": rules.group_rate_count,
        "step": 1,
        "random": 1,
        "calls": int(rules.gradients.stay_until_update),
    }
    return tuple((name, count) for name, count in counts.items() if count)


@dataclass(frozen=True)
class StepLayout:
    """Everything that the C files are generated from."""

    name: str
    memory: Memory
    rules: UpdateRules
    step: Pass
    infer: Pass
    """The model in evaluation mode, with its loss if the graph has an output."""
    step_outputs: tuple[PersistentTensor, ...]
    """Tensors that the model returns in training mode."""
    outputs: tuple[PersistentTensor, ...]
    """Tensors that the model returns in evaluation mode, as `infer` writes them."""
    weights_file: bool = False
    """Whether weights are in NAME.bin, which the caller reads, instead of NAME_weights.h."""
    has_separate_arena: bool = False
    """Whether the state has a pointer to the arena, not the arena itself."""

    @property
    def has_evaluation_loss(self) -> bool:
        """Whether the loss can be computed in evaluation mode."""
        return bool(self.infer.device.graph.outputs)

    @property
    def byte_inputs(self) -> tuple[tuple[str, bool], ...]:
        """C arguments of eight bits, and whether a buffer of each in floats is computed."""
        runs = (self.step, self.infer)
        with_buffer = {run.inputs[value] for run in runs for value in inputs_with_normalized_buffer(run.device.graph)}
        values = self.step.device.graph.values
        byte_names = [name for value, name in self.step.inputs.items() if values[value].dtype in BYTES]
        return tuple((name, name in with_buffer) for name in byte_names)

    @property
    def arena_input(self) -> tuple[str, int] | None:
        """The C argument that lies in the arena, and its bytes; None if none does."""
        if self.step.arena_input is None:
            return None
        value, _, size = self.step.arena_input
        return self.step.inputs[value], size

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, which both passes share."""
        return max(self.step.placement.bytes, self.infer.placement.bytes, 4)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state struct without the arena: weights, optimizer state, statistics, counters, and pointers of
        four bytes to a weights file and to an arena apart."""
        pointers = self.weights_file + self.has_separate_arena
        return 4 * (sum(count for _, count in self.saved_members) + pointers)

    @property
    def saved_members(self) -> tuple[tuple[str, int], ...]:
        """Members of the state struct that `save` writes, in order, and the number of elements of four bytes each."""
        return state_members(self.memory, self.rules)

    @property
    def constant_bytes(self) -> int:
        """Bytes of constant tensors in the program: those that the model's code creates, and integer weights."""
        arrays = [array for run in (self.step, self.infer) for array in run.device.constants.values()]
        distinct = {(array.tobytes(), array.dtype): array for array in arrays}  # the program has equal ones once
        return sum(array.size if array.dtype == np.int8 else 4 * array.size for array in distinct.values())
