"""The workspace of cuDNN's recurrent networks: cuDNN names it on a card only, so it is measured or expected."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Literal

from memplan.cudnn.expected_workspace import ExpectedWorkspace

Kind = Literal["lstm", "gru", "rnn"]
Algorithm = Literal["standard", "persistent", "small hidden"]

GATES: dict[Kind, int] = {"lstm": 4, "gru": 3, "rnn": 1}
_STATES: dict[Kind, int] = {"lstm": 10, "gru": 5, "rnn": 2}
"""States of a step in the workspace, of each layer and direction: fitted to what was measured."""
_FIXED = (16 << 20) + 768
"""Bytes of the workspace whatever the network: fitted, too."""
_SEEN = (9, 0)
"""Compute capability of the cards that were measured, an H100 and an H200."""
_NEAR, _FAR = (0.8, 1.0, 1.25), (0.0, 1.0, 1.5)
"""Possible workspaces as shares of the formula: of networks like the measured ones, and of others."""
_PROBABILITIES = (0.1, 0.8, 0.1)


@dataclass(frozen=True, slots=True)
class RecurrentQuestion:
    """A recurrent network as torch describes it to cuDNN. Source: native/cudnn/RNN.cpp."""

    kind: Kind
    algorithm: Algorithm
    rows: int
    """Steps of all sequences of the batch."""
    batch: int
    inputs: int
    hidden: int
    layers: int
    bidirectional: bool
    dropout: float
    itemsize: int
    projection: int
    """Size of an LSTM's projected output; 0: none."""
    training: bool

    @property
    def key(self) -> str:
        """The question as JSON text, equal for equal questions."""
        return json.dumps(astuple(self), separators=(",", ":"))


def rnn_weight_bytes(
    kind: Kind, inputs: int, hidden: int, layers: int, bidirectional: bool, itemsize: int, projection: int = 0
) -> int:
    """Bytes of all weights and biases of a recurrent network in a single buffer. cuDNN has two biases per gate, whether
    or not torch has any.

    If the weights of a module are not views of one buffer (never flattened, or moved since), ``_cudnn_rnn`` allocates
    such a buffer at every call and the graph keeps it alive. Source: cudnn/RNN.cpp. ``projection``: size of the
    projected output, 0 without.
    """
    gates, directions = GATES[kind], 2 if bidirectional else 1
    output = projection or hidden
    elements = 0
    for layer in range(layers):
        width = inputs if layer == 0 else output * directions
        elements += directions * (gates * hidden * (width + output + 2) + projection * hidden)
    return elements * itemsize


def rnn_matrix_bytes(
    kind: Kind, inputs: int, hidden: int, layers: int, bidirectional: bool, itemsize: int, projection: int = 0
) -> int:
    """Bytes of the weights of a recurrent network without the biases. ``projection``: size of the projected output, 0
    without."""
    biases = layers * (2 if bidirectional else 1) * GATES[kind] * 2 * hidden * itemsize
    return rnn_weight_bytes(kind, inputs, hidden, layers, bidirectional, itemsize, projection) - biases


def expected_recurrent(question: RecurrentQuestion, architecture: tuple[int, int]) -> ExpectedWorkspace:
    """Return the expected workspace of a recurrent network on a card of this compute capability.

    The formula is read off seven networks on an H100 and an H200 (cuDNN 9.19), all of which it gives within 1 %: a copy
    of the matrices, 16 MiB, some states of a step, and for each step of each sequence the gradients of the gates, an
    output per layer and, with several layers, the input. The kernel for small hidden sizes works on all layers at once.
    """
    q = question
    directions = 2 if q.bidirectional else 1
    like_measured = (
        architecture == _SEEN and q.training and q.kind != "rnn" and q.algorithm != "persistent"
        and not q.projection and q.itemsize <= 4
    )  # fmt: skip
    if q.algorithm == "small hidden":
        values_per_step = 3 * GATES[q.kind] * q.layers * directions * q.hidden
    else:
        outputs = q.layers - (q.kind == "gru" or q.itemsize == 2)  # fitted: of a layer less for these
        values_per_step = directions * (GATES[q.kind] + outputs) * q.hidden
        if q.layers > 1:
            values_per_step += q.inputs + (3 * q.hidden if q.bidirectional else 0)
    copies = 2 if q.itemsize == 2 else 1
    matrices = rnn_matrix_bytes(q.kind, q.inputs, q.hidden, q.layers, q.bidirectional, q.itemsize, q.projection)
    states = q.layers * directions * (_STATES[q.kind] + 2 * q.bidirectional) * q.batch * q.hidden * max(4, q.itemsize)
    size = copies * matrices + values_per_step * q.rows * q.itemsize + states + _FIXED
    sizes = tuple(int(share * size) for share in (_NEAR if like_measured else _FAR))
    return ExpectedWorkspace(size, sizes, _PROBABILITIES)
