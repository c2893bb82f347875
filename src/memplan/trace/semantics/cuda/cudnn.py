"""cuDNN's batch norm and recurrent networks: when torch uses them, and the bytes of their reserves and workspaces.

cuDNN reports sizes only on a card, so undocumented ones are intervals of bytes, (low, high).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from memplan.cudnn.recurrent import GATES, Algorithm, Kind, RecurrentQuestion, rnn_matrix_bytes
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.kinds import Arguments
from memplan.trace.semantics.layout import bytes_of, ceil_div, copy_bytes, like_channels_last

Interval = tuple[int, int]

_MAX_BATCH = {True: 880_801, False: 65_535}
"""Whether in training -> largest batch of cuDNN's batch norm."""
_INT_MAX = (1 << 31) - 1
_SAVED_VALUES: dict[Kind, int] = {"lstm": 5, "gru": 6, "rnn": 1}
_HEADER, _MAX_VALUES_PER_ROW = 256, 12
MODES: dict[int, Kind] = {0: "rnn", 1: "rnn", 2: "lstm", 3: "gru"}
"""cuDNN mode number, as torch passes it -> kind."""


class Choice(NamedTuple):
    """Whether cuDNN is used, and why."""

    cudnn: bool
    reason: str


def uses_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    epsilon: float,
    enabled: bool | None = None,
) -> Choice:
    """Return whether ``batch_norm`` on CUDA runs cuDNN, and why: the same rule in 2.11 to 2.15.

    ``enabled``: whether cuDNN is enabled; by default ``torch.backends.cudnn.enabled``. Source:
    native/Normalization.cpp, _select_batch_norm_backend.
    """
    enabled = torch.backends.cudnn.enabled if enabled is None else enabled
    dtypes = {t.dtype for t in (x, weight) if t is not None}
    untracked = running_mean is None and running_var is None
    tracked = running_mean is not None and running_var is not None
    max_batch = _MAX_BATCH[bool(training)]
    refusals = (
        (not enabled, "cuDNN is switched off"),
        (weight is None or bias is None, "it has no weight and bias"),
        (torch.bfloat16 in dtypes, "cuDNN's does not take bfloat16"),
        (x.dtype is torch.float16 and torch.float32 not in dtypes, "a float16 input needs a float32 weight"),
        (not (tracked or (untracked and training)), "there are no running statistics to normalize with"),
        (x.dim() < 3, "the input has no spatial dimension"),
        (x.dim() >= 1 and x.shape[0] > max_batch, f"the batch is over {max_batch}"),
        (epsilon < 0, "epsilon is negative"),
        (x.numel() >= _INT_MAX, "the input has 2^31 elements or more"),
    )
    for refused, reason in refusals:
        if refused:
            return Choice(cudnn=False, reason=f"native batch norm: {reason}")
    return Choice(cudnn=True, reason="cuDNN's batch norm")


def _is_persistent(x: torch.Tensor, training: bool) -> bool:
    """Return whether cuDNN runs its persistent kernel: in training, for channels last (cudnn/BatchNorm.cpp,
    getCudnnBatchNormMode)."""
    return training and like_channels_last(x.shape, x.stride()) and not x.is_contiguous()


_MEASURED = (9, 0)
"""Compute capability of the card on which cuDNN's persistent batch norm was measured: an H100, cuDNN 9.19."""


def batch_norm_reserve_bytes(x: torch.Tensor, training: bool, arch: Arch) -> Interval:
    """Bytes that cuDNN's batch norm saves for its backward pass, as an interval.

    0 without training. torch asks for the norm alone (CUDNN_BATCHNORM_OPS_BN), which needs no mask of an activation:
    0 is expected, was measured on an H100, and is what other frameworks rely on. cuDNN does not document it, so on
    other cards the upper end for the persistent kernel is the mask of a fused activation, one bit per element.
    """
    if not _is_persistent(x, training) or arch.capability == _MEASURED:
        return 0, 0
    return 0, ceil_div(x.numel(), 8)


def batch_norm_workspace_bytes(x: torch.Tensor, training: bool, arch: Arch, *, backward: bool = False) -> Interval:
    """Return the bytes of the workspace of cuDNN's batch norm, which only the persistent kernel needs.

    Not documented. Each tile of 64 rows, or 96 in the backward pass, has two float32 sums per channel and, forward, a
    counter per 64 channels; counters and a small constant are added once. Exact on an H100 for the six shapes in
    ``goldens/`` (``batch_norm_channels_last``, ``resnet18_channels_last``); the upper end on other cards.
    """
    if not _is_persistent(x, training):
        return 0, 0
    channels = x.shape[1]
    rows, counters = x.numel() // max(1, channels), 4 * ceil_div(channels, 64)
    if backward:
        size = ceil_div(rows, 96) * 8 * channels + counters + 1056
    else:
        size = ceil_div(rows, 64) * (8 * channels + counters) + counters + 1072
    return (size if arch.capability == _MEASURED else 0), size


def reserve_of(question: RecurrentQuestion) -> Interval:
    """Bytes that cuDNN's recurrent network saves for its backward pass, as an interval; 0 without training.

    For every step, sample, hidden unit and direction, 5 values a layer for an LSTM (four gates and the cell), 6 for a
    GRU, 1 for a plain network, and the output of every layer but the last. That is exactly what cuDNN 7 asked for
    in pytorch#2895, 736,000,000 bytes for an LSTM and 864,000,000 for a GRU of 4 layers. An H100 and an H200 (cuDNN
    9.19, seven networks) need 256 bytes more, and with dropout a bit for each output of every layer but the last. For
    plain networks and projections, which neither ran, the upper end adds one value a layer, with dropout the dropped
    outputs, and the projected outputs.
    """
    q = question
    if not q.training:
        return 0, 0
    directions = 2 if q.bidirectional else 1
    row = q.rows * directions * q.itemsize  # bytes of a value for every step, sample and direction
    inner_outputs = (q.layers - 1) * (q.projection or q.hidden)  # of every layer but the last
    low = row * (q.layers * _SAVED_VALUES[q.kind] * q.hidden + inner_outputs)
    if q.kind != "rnn" and not q.projection:
        dropout_mask = ceil_div((q.layers - 1) * q.rows * directions * q.hidden, 8) if q.dropout else 0
        return low + _HEADER + dropout_mask, low + _HEADER + dropout_mask
    extra = row * (q.layers * (q.hidden + q.projection) + (inner_outputs if q.dropout else 0))
    return low, low + extra + _HEADER


def recurrent_question(args: Arguments, arch: Arch, *, backward: bool = False) -> RecurrentQuestion:
    """The parameters that determine the sizes of a ``_cudnn_rnn`` call, from the arguments of its overload.

    ``backward``: whether the sizes are those of the derivative, which chooses its algorithm by other limits.
    """
    x, (mode, hidden, projection, layers, batch_first, dropout, training, bidirectional, batch_sizes) = (
        args[0],
        args[6:15],
    )
    if batch_sizes:  # a packed sequence: (rows, inputs)
        rows, batch = x.shape[0], batch_sizes[0]
    else:
        rows, batch = x.shape[0] * x.shape[1], x.shape[0 if batch_first else 1]
    kind = MODES[mode]
    standard = bool(batch_sizes) or bool(projection) or x.dtype is torch.float64
    algorithm: Algorithm = "standard"
    if not standard and arch.capability >= (6, 0) and hidden <= _SMALL_HIDDEN[backward, kind == "rnn"]:
        algorithm = "small hidden"
    question = RecurrentQuestion(
        kind=kind, algorithm=algorithm, rows=rows, batch=batch, inputs=x.shape[-1], hidden=hidden, layers=layers,
        bidirectional=bidirectional, dropout=dropout, itemsize=x.element_size(), projection=projection,
        training=training,
    )  # fmt: skip
    if not standard and algorithm == "standard" and x.dtype is torch.float16 and _is_persistent_rnn(question, arch):
        return replace(question, algorithm="persistent")
    return question


_SMALL_HIDDEN = {(False, False): 192, (False, True): 384, (True, False): 128, (True, True): 256}
"""(backward, plain network) -> hidden size up to which torch takes the kernel for small ones. Source:
cudnn/RNN.cpp, use_rnn_persist_small_h."""


def _is_persistent_rnn(question: RecurrentQuestion, arch: Arch) -> bool:
    """Whether torch takes cuDNN's persistent kernel for float16. Source: cudnn/RNN.cpp, use_persist_common_heuristics
    and use_persist_device_heuristics."""
    q = question
    if q.layers != 1 or q.bidirectional or q.hidden > 1024 or q.hidden % 128 or q.inputs % 128:
        return False
    if arch.capability == (7, 0):
        batch, steps = q.batch, q.rows // max(1, q.batch)
        fits = batch == 8 or (batch % 16 == 0 and batch not in (80, 112))
        return fits and (
            (steps >= 40 and batch <= 128) or (steps >= 20 and batch <= 96) or (steps >= 10 and batch <= 32)
        )
    if arch.capability < (8, 0) or arch.multiprocessors < 98 or arch.capability[1] == 6 or q.kind == "gru":
        return False
    return q.batch % 8 == 0 and q.batch <= 128 and (q.kind == "lstm" or q.batch < 96 or q.hidden < 896)


def workspace_of(question: RecurrentQuestion) -> Interval:
    """Bytes of the workspace of cuDNN's recurrent network, as an interval.

    In pytorch#2895 cuDNN asked for another copy of the matrices, and three states a gate less one for every layer
    (17,730,560 and 13,169,920 bytes). An H100 and an H200 (cuDNN 9.19, seven networks) need another 3 to 12 values for
    every step, sample, hidden unit, layer and direction; the upper end has 12. Persistent kernels need less: the
    lower end is 0.
    """
    q = question
    matrices = rnn_matrix_bytes(q.kind, q.inputs, q.hidden, q.layers, q.bidirectional, q.itemsize, q.projection)
    states = (3 * GATES[q.kind] - 1) * q.batch + _MAX_VALUES_PER_ROW * q.rows
    return 0, matrices + q.layers * (2 if q.bidirectional else 1) * states * q.hidden * q.itemsize


def dropout_state_bytes(arch: Arch) -> int:
    """Return the bytes of the random states that recurrent networks with dropout share: allocated once per card, never
    freed.

    24 bytes per resident thread of the card: 6,488,064 on an H100 and an H200 (measured). Source: cudnn/RNN.cpp,
    get_dropout_state.
    """
    return 24 * arch.threads * arch.multiprocessors


def input_copy(args: Arguments, *, batch_first: bool) -> int:
    """Return the bytes of the contiguous, time-first copy of a recurrent network's input; 0 if no copy is needed."""
    return copy_bytes(args[0].transpose(0, 1) if batch_first else args[0])


def gradient_copies(args: Arguments, *, batch_first: bool) -> tuple[list[int], int]:
    """Return the copies that ``_cudnn_rnn_backward`` makes of its gradients, from its arguments.

    First the bytes of each tensor of zeros for a missing gradient, then those of the contiguous, time-first copy of the
    output's gradient. Source: cudnn/RNN.cpp, _cudnn_rnn_backward and _cudnn_rnn_backward_input.
    """
    hx, cx, output, grad_output, grad_hy, grad_cy = args[4:10]
    states = ((grad_hy, hx), (grad_cy, cx))
    zeros = [bytes_of(state) for gradient, state in states if gradient is None and state is not None]
    if grad_output is None:  # the zeros are contiguous, batch first
        return [bytes_of(output), *zeros], bytes_of(output) if batch_first else 0
    return zeros, copy_bytes(grad_output.transpose(0, 1) if batch_first else grad_output)
