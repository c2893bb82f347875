"""Composite ops that decompose by device: their CUDA decompositions, while a CUDA step is recorded on the CPU.

Such an op is decomposed before it reaches a dispatch mode, on the CPU as for the CPU. So during a recording, kernels
for it are registered in the dispatcher, which calls from C++ reach, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from memplan._torch import FakeTensor, dispatch, no_modes
from memplan.cudnn.recurrent import rnn_weight_bytes
from memplan.errors import DataDependentError
from memplan.trace.semantics.cuda import sdpa_choice
from memplan.trace.semantics.cuda.cudnn import MODES, uses_batch_norm
from memplan.trace.semantics.cuda.sdpa_choice import Arch, Enabled
from memplan.trace.semantics.layout import in_own_format

OnCard = Callable[[torch.Tensor], bool]
Chosen = Callable[[str, str], None]

_ATEN = torch.ops.aten
_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.MATH.value: "math",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}
_NUMBERS = {name: number for number, name in _BACKENDS.items()}
_FUSED_NORM = _ATEN._fused_rms_norm.default
_RECURRENT = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Recurrent op -> cuDNN's mode number."""
_MEAN = 1
"""Number of the reduction "mean" of a loss in C++."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """Replacements for inference mode, where composite ops reach a dispatch mode undecomposed, without a call of the
    registered kernels."""

    instead: Mapping[Any, Callable[..., Any]]
    whole: frozenset[Any]
    """Ops with a CUDA kernel, which are not decomposed if their first argument is on the card."""
    differing: set[Arch]
    """Compute capabilities on which the step runs other kernels; filled while the step runs."""


@contextmanager
def installed(
    on_card: OnCard, arch: Arch, chosen: Chosen, others: frozenset[Arch] = frozenset()
) -> Iterator[Replacements]:
    """Decompose composite ops as on CUDA, for the time of a recording.

    Args:
        on_card: whether a tensor represents one on the card; others are decomposed as on the CPU.
        arch: the card's compute capability.
        chosen: called with (name of an op that could run several kernels, reason for the choice as a sentence).
        others: compute capabilities to compare with; `Replacements.differing` collects those with another choice.
    """
    table = _Table(on_card, arch, chosen, others)
    order = sdpa_choice.default_order(arch, sdpa_choice.versions()[1])
    kernels = {
        "batch_norm": table.batch_norm,
        "dropout": table.dropout,
        "scaled_dot_product_attention": table.attention,
        "softmax.int": table.softmax,
        "log_softmax.int": table.log_softmax,
        "lstm_cell": table.lstm_cell,
        "gru_cell": table.gru_cell,
        "ctc_loss.Tensor": table.ctc_loss,
    }
    for name in _RECURRENT:
        kernels |= {f"{name}.input": table.recurrent(name), f"{name}.data": table.packed_recurrent(name)}
    instead = {_overload(name): kernel for name, kernel in kernels.items()}
    with (
        dispatch.overridden({**kernels, "_fused_rms_norm": table.rms_norm}, dispatch.AUTOGRAD_CPU),
        dispatch.attention_order(tuple(_NUMBERS[kernel] for kernel in order)),
    ):
        yield Replacements(instead, frozenset({_FUSED_NORM}), table.differing)


def _overload(name: str) -> Any:
    """Return the op of aten with a name such as ``softmax.int``; without an overload, the default."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


def enabled_now() -> Enabled:
    """Return the kernels that `scaled_dot_product_attention` may choose under torch's current settings."""
    allowed, (torch_version, cudnn_version) = torch.backends.cuda, sdpa_choice.versions()
    order: list[Any] = [_BACKENDS[number] for number in dispatch.tried_in_order() if number in _BACKENDS]
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return Enabled(
        flash=allowed.flash_sdp_enabled(),
        efficient=allowed.mem_efficient_sdp_enabled(),
        cudnn=allowed.cudnn_sdp_enabled(),
        math=allowed.math_sdp_enabled(),
        order=tuple(order),
        deterministic=strict,
        torch=torch_version,
        cudnn_version=cudnn_version,
    )


class _Table:
    """The CUDA decompositions: methods with the arguments of their op. For tensors on the host, the CPU's run."""

    def __init__(self, on_card: OnCard, arch: Arch, chosen: Chosen, others: frozenset[Arch]) -> None:
        """Decompose for a card.

        Args:
            on_card: returns whether a tensor represents one on the card.
            arch: the card's compute capability.
            chosen: called with (name of an op that could run several kernels, reason for the choice).
            others: compute capabilities whose choices are compared with the card's.
        """
        self._on_card = on_card
        self._arch = arch
        self._chosen = chosen
        self._others = others
        self.differing: set[Arch] = set()
        """Architectures on which an op would decompose to another kernel."""

    def dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """Dropout (native/Dropout.cpp): if anything is dropped at random, a single kernel that saves a bool mask."""
        if train and 0 < p < 1 and x.numel() and self._on_card(x):
            return _ATEN.native_dropout.default(x, p, train)[0]
        return dispatch.composite(_ATEN.dropout.default, x, p, train)

    def batch_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
        epsilon: float,
        enabled: bool,
    ) -> torch.Tensor:
        """Batch norm (native/Normalization.cpp, _batch_norm_impl_index).

        cuDNN reads and saves a contiguous or channels-last input: any other input is copied to such a format first.
        """
        if self._on_card(x) and uses_batch_norm(x, weight, bias, mean, variance, training, epsilon, enabled).cudnn:
            x = in_own_format(x)
        return dispatch.composite(
            _ATEN.batch_norm.default, x, weight, bias, mean, variance, training, momentum, epsilon, enabled
        )

    def softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Softmax (native/SoftMax.cpp): float16 is converted to float32 in the kernel, without a copy first."""
        if dtype is torch.float32 and x.dtype is torch.float16 and self._on_card(x):
            return _ATEN._softmax.default(x, dim, True)
        return dispatch.composite(_ATEN.softmax.int, x, dim, dtype)

    def log_softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Log-softmax (native/SoftMax.cpp): float16 is converted to float32 in the kernel, without a copy first."""
        if dtype is torch.float32 and x.dtype is torch.float16 and self._on_card(x):
            return _ATEN._log_softmax.default(x, dim, True)
        return dispatch.composite(_ATEN.log_softmax.int, x, dim, dtype)

    def rms_norm(self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
        """RMS norm (native/layer_norm.cpp): one kernel that saves its input and a float32 statistic per row.

        ``rms_norm`` itself is not replaced: it calls this op under the same conditions on every device.
        """
        if self._on_card(x):
            return dispatch.whole(_FUSED_NORM, x, shape, weight, eps)
        return dispatch.composite(_FUSED_NORM, x, shape, weight, eps)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention (native/transformers/attention.cpp) by the kernel that `sdpa_choice.choose` selects."""
        if not self._on_card(query) or not _are_valid(query, key, value, attn_mask, is_causal):
            return dispatch.composite(
                _ATEN.scaled_dot_product_attention.default,
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        choice = sdpa_choice.choose(*arguments, arch=self._arch, enabled=enabled_now())
        self._compare_cards(arguments, choice.kernel)
        self._chosen("scaled_dot_product_attention", f"{_TITLES[choice.kernel]}: {choice.reason}")
        if choice.kernel == "math":
            return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        unbatched = query.dim() == 3
        if unbatched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        kernel = _KERNELS[choice.kernel]
        output = kernel(_Call(query, key, value, attn_mask, dropout_p, is_causal, scale))
        return output.squeeze(0) if unbatched else output

    def _compare_cards(self, arguments: tuple[Any, ...], kernel: str) -> None:
        """Add the compute capabilities on which attention runs another kernel than ``kernel``, or none."""
        enabled = enabled_now()
        for other in self._others - self.differing:
            order = sdpa_choice.default_order(other, enabled.cudnn_version)
            try:
                choice = sdpa_choice.choose(*arguments, arch=other, enabled=replace(enabled, order=order))
            except RuntimeError:  # no kernel supports the arguments there
                self.differing.add(other)
            else:
                if choice.kernel != kernel:
                    self.differing.add(other)

    def recurrent(self, name: str) -> Callable[..., Any]:
        """Return the kernel of a recurrent op (native/RNN.cpp): cuDNN's, with the weights in one buffer, since modules
        flatten them when moved to the card."""
        op = getattr(_ATEN, name).input

        def run(x: torch.Tensor, states: Any, weights: list[torch.Tensor], *options: Any) -> Any:
            """Run a recurrent network by cuDNN's op, or decomposed where cuDNN refuses it."""
            if not self._on_card(x):
                return dispatch.composite(op, x, states, weights, *options)
            refusal = self._cudnn_refusal(x)
            if refusal:
                self._chosen(name, f"{refusal}: not cuDNN's, and recorded with the CPU's parts")
                return dispatch.composite(op, x, states, weights, *options)
            hx, cx = states if name == "lstm" else (states, None)
            output, hy, cy = _cudnn_recurrent(_RECURRENT[name], x, hx, cx, weights, *options)
            return (output, hy, cy) if name == "lstm" else (output, hy)

        return run

    def _cudnn_refusal(self, x: torch.Tensor) -> str | None:
        """Return why cuDNN does not run a recurrent network on input ``x`` (native/RNN.cpp, use_cudnn); None if it
        does."""
        if not torch.backends.cudnn.enabled:
            return "cuDNN is switched off"
        if x.dtype is torch.bfloat16:
            self.differing |= {other for other in self._others if (other < (8, 0)) != (self._arch < (8, 0))}
            if self._arch < (8, 0):
                return "cuDNN takes bfloat16 from sm_80 on"
        return None if x.numel() else "the input is empty"

    def packed_recurrent(self, name: str) -> Callable[..., Any]:
        """Return the kernel of a recurrent op on packed sequences (native/RNN.cpp): cuDNN's. Their batch sizes are in
        host memory."""
        op = getattr(_ATEN, name).data

        def run(
            data: torch.Tensor, batch_sizes: torch.Tensor, states: Any, weights: list[torch.Tensor], *options: Any
        ) -> Any:
            """Run a recurrent network of packed sequences by cuDNN's op; their lengths have to be known."""
            if not self._on_card(data):
                return dispatch.composite(op, data, batch_sizes, states, weights, *options)
            if isinstance(batch_sizes, FakeTensor) or self._cudnn_refusal(data):
                raise DataDependentError(
                    f"{name} of a packed sequence, whose lengths are values, and recording has no values",
                    expected="a recurrent network of padded sequences",
                    do="Leave the sequences padded, or run memplan.measure(build): it really runs the step",
                )
            hx, cx = states if name == "lstm" else (states, None)
            with no_modes():  # `batch_first` is False
                switches: tuple[Any, ...] = (*options, False, batch_sizes.tolist())
            output, hy, cy = _cudnn_recurrent(_RECURRENT[name], data, hx, cx, weights, *switches)
            return (output, hy, cy) if name == "lstm" else (output, hy)

        return run

    def lstm_cell(
        self,
        x: torch.Tensor,
        states: list[torch.Tensor],
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """LSTM cell (native/RNN.cpp, LSTMCell): two products and one kernel for all gates, which saves them."""
        if not self._on_card(x):
            return dispatch.composite(_ATEN.lstm_cell.default, x, states, w_ih, w_hh, b_ih, b_hh)
        gates = x @ w_ih.t(), states[0] @ w_hh.t()
        return _ATEN._thnn_fused_lstm_cell.default(*gates, states[1], b_ih, b_hh)[:2]

    def gru_cell(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """GRU cell (native/RNN.cpp, GRUCell): like `lstm_cell`."""
        if not self._on_card(x):
            return dispatch.composite(_ATEN.gru_cell.default, x, hidden, w_ih, w_hh, b_ih, b_hh)
        return _ATEN._thnn_fused_gru_cell.default(x @ w_ih.t(), hidden @ w_hh.t(), hidden, b_ih, b_hh)[0]

    def ctc_loss(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: torch.Tensor,
        target_lengths: torch.Tensor,
        blank: int = 0,
        reduction: int = _MEAN,
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        """CTC loss (native/LossCTC.cpp): lengths are read on the host; a mean divides by them on the card."""
        op, arguments = _ATEN.ctc_loss.Tensor, (log_probs, targets, input_lengths, target_lengths, blank)
        if reduction != _MEAN or not self._on_card(log_probs) or self._on_card(target_lengths):
            return dispatch.composite(op, *arguments, reduction, zero_infinity)
        losses = dispatch.composite(op, *arguments, 0, zero_infinity)
        # without names for the temporaries, which would keep them alive
        return (losses / losses.new_empty(target_lengths.shape).copy_(target_lengths).clamp_min(1)).mean()


_TITLES = {"flash": "flash", "efficient": "memory-efficient", "cudnn": "cuDNN", "math": "math"}


def _are_valid(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> bool:
    """Whether the arguments of attention are valid at all; if not, the original op raises its own error."""
    tensors = (query, key, value)
    if len({t.dtype for t in tensors}) > 1 or any(t.dim() < 2 or t.is_nested for t in tensors):
        return False
    return mask is None or (not causal and mask.dtype in (torch.bool, torch.float32, query.dtype))


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of attention, (batch, heads, length, head size) each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None

    @property
    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value


def _flash(call: _Call) -> torch.Tensor:
    """Run flash attention. Heads are padded to a multiple of 8 first, and the padded tensors are saved for backward."""
    head = call.query.shape[-1]
    scale = 1 / math.sqrt(head) if call.scale is None else call.scale
    heads = [functional.pad(t, [0, -head % 8]) for t in call.heads] if head % 8 else call.heads
    kernel = _ATEN._scaled_dot_product_flash_attention.default
    output: torch.Tensor = kernel(*heads, call.dropout, call.causal, False, scale=scale)[0]
    return output[..., :head] if head % 8 else output


def _efficient(call: _Call) -> torch.Tensor:
    """Run memory-efficient attention. The mask is converted to an additive one with rows aligned to 8 elements, and
    expanded."""
    mask = call.mask
    if mask is not None:
        aligned = _aligned_mask(_additive(mask, call.query.dtype))
        mask = aligned.expand(*call.query.shape[:3], call.key.shape[2])
    kernel = _ATEN._scaled_dot_product_efficient_attention.default
    compute_logsumexp = _needs_gradient(*call.heads)
    return kernel(*call.heads, mask, compute_logsumexp, call.dropout, call.causal, scale=call.scale)[0]


def _cudnn(call: _Call) -> torch.Tensor:
    """Run cuDNN's attention."""
    mask = None if call.mask is None else _additive(call.mask, call.query.dtype)
    kernel = _ATEN._scaled_dot_product_cudnn_attention.default
    compute_logsumexp = _needs_gradient(*call.heads)
    return kernel(*call.heads, mask, compute_logsumexp, call.dropout, call.causal, False, scale=call.scale)[0]


_KERNELS = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to the scores. A bool mask becomes 0 where it is true, -inf elsewhere."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, mask.new_full((), 0.0, dtype=dtype), -math.inf)


def _aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin at multiples of 8 elements: the mask itself, or a view of a padded copy."""
    if mask.stride(-1) == 1 and not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return functional.pad(mask, [0, 8 - columns % 8])[..., :columns]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """Attention by two products and a softmax, in float32 for half precision.

    Not torch's own decomposition, which adds the mask in place for real tensors but out of place for fake ones.
    """
    dtype = query.dtype
    bias = None if mask is None else _additive(mask, dtype)
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if dtype in (torch.float16, torch.bfloat16) and not allowed:
        query, key, value = query.float(), key.float(), value.float()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    scaled = _ATEN.mul.Scalar(query, math.copysign(root, scale))  # as in C++: no tensor is saved for a scalar
    if causal:
        square = (query.shape[-2], key.shape[-2])
        # without a name for the bool mask, which would keep it alive
        bias = _additive(scaled.new_ones(square, dtype=torch.bool).tril(), scaled.dtype)
    if gqa:
        key, value = (_repeat_heads(t, query.shape[-3]) for t in (key, value))
    weights = scaled @ _ATEN.mul.Scalar(key.transpose(-2, -1), root)
    if bias is not None:
        weights.add_(bias)
    weights = _ATEN._safe_softmax.default(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    output = (weights @ value).to(dtype)
    unused_result = weights.to(dtype)  # the second result of torch's op: unused, but allocated
    del unused_result
    return output


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each head of keys or values, (..., heads, length, head size), up to this number of heads."""
    return tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], -3)


def _flattened(weights: list[torch.Tensor]) -> bool:
    """Whether the weights of a recurrent network lie in one buffer (cudnn/RNN.cpp, try_get_weight_buf).

    A computed weight (weight drop, weight norm) never does, nor does a parameter that is used twice. Autocast makes the
    buffer itself, when it casts. `flatten_parameters` leaves bfloat16 weights separate: the dtype is not in
    torch.backends.cudnn.CUDNN_TENSOR_DTYPES.
    """
    if torch.is_autocast_enabled("cuda") and weights[0].dtype is not torch.float16:
        return True
    if weights[0].dtype is torch.bfloat16:
        return False
    return all(weight.is_leaf for weight in weights) and len(set(map(id, weights))) == len(weights)


def _cudnn_recurrent(
    mode: int,
    x: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    weights: list[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run cuDNN's recurrent op (cudnn/RNN.cpp, _cudnn_impl). Returns output, last hidden states and last cells."""
    hidden = (hx if cx is None else cx).shape[2]
    projection = 0 if hx.shape[2] == hidden else hx.shape[2]
    weights_per_layer = (4 if biases else 2) + bool(projection)  # and direction
    # with elements of 1 byte: the number of elements
    elements = rnn_weight_bytes(
        MODES[mode], x.shape[-1], hidden, layers, bidirectional, itemsize=1, projection=projection
    )
    with torch.no_grad():
        if _flattened(weights):  # the buffer exists already: an expanded element has its size, and allocates nothing
            buffer = weights[0].detach().reshape(-1)[:1].expand(elements)
        else:  # "RNN module weights are not part of single contiguous chunk": saved for the backward pass
            buffer = weights[0].new_empty(elements)
    return _ATEN._cudnn_rnn.default(
        x, weights, weights_per_layer, buffer, hx, cx, mode, hidden, projection, layers, batch_first, dropout, train,
        bidirectional, list(batch_sizes), None,
    )[:3]  # fmt: skip
