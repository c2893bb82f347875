"""Composite ops that choose by device: what each is made of on CUDA, while a step for CUDA is recorded on the CPU.

Such an op is taken apart before a dispatch mode sees it, and on the CPU it would be into the CPU's parts. So kernels of
ours stand above it for the time of a recording, in the dispatcher, where calls from C++ are caught as well.
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
from memplan.errors import DataDependentError
from memplan.trace.semantics.cuda import sdpa_choice
from memplan.trace.semantics.cuda.cudnn import MODES, rnn_weight_bytes, uses_batch_norm
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
"""Recurrent networks -> cuDNN's number for them."""
_MEAN = 1
"""Reduction of a loss, as C++ numbers it."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """For inference mode, where composite ops reach a dispatch mode whole and no kernel of ours is called.

    ``instead`` maps an op to the function to call in its place. An op of ``whole`` has a kernel of its own on the card:
    it is not to be taken apart where its first argument is there.
    """

    instead: Mapping[Any, Callable[..., Any]]
    whole: frozenset[Any]
    differing: set[Arch]
    """Filled while the step runs."""


@contextmanager
def installed(
    on_card: OnCard, arch: Arch, chosen: Chosen, others: frozenset[Arch] = frozenset()
) -> Iterator[Replacements]:
    """Make CUDA's choices for the time of a recording.

    Args:
        on_card: whether a tensor stands for one on the card; for others the CPU's choice stays.
        arch: the card's compute capability.
        chosen: told which kernel an op took where there was a choice: the op's name and a reason, one sentence.
        others: compute capabilities to compare with; `Replacements.differing` says on which an op takes another kernel.
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
        kernels |= {f"{name}.input": table.recurrent(name), f"{name}.data": table.packed(name)}
    instead = {_overload(name): kernel for name, kernel in kernels.items()}
    with (
        dispatch.overridden({**kernels, "_fused_rms_norm": table.rms_norm}, dispatch.AUTOGRAD_CPU),
        dispatch.attention_order(tuple(_NUMBERS[kernel] for kernel in order)),
    ):
        yield Replacements(instead, frozenset({_FUSED_NORM}), table.differing)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


def enabled_now() -> Enabled:
    """Return what `scaled_dot_product_attention` may choose from, as `torch.backends.cuda` and its contexts say now."""
    allowed, version = torch.backends.cuda, sdpa_choice.versions()
    order: list[Any] = [_BACKENDS[number] for number in dispatch.tried_in_order() if number in _BACKENDS]
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return Enabled(
        flash=allowed.flash_sdp_enabled(),
        efficient=allowed.mem_efficient_sdp_enabled(),
        cudnn=allowed.cudnn_sdp_enabled(),
        math=allowed.math_sdp_enabled(),
        order=tuple(order),
        deterministic=strict,
        torch=version[0],
        cudnn_version=version[1],
    )


class _Table:
    """The ops that are made of other parts on CUDA."""

    def __init__(self, on_card: OnCard, arch: Arch, chosen: Chosen, others: frozenset[Arch]) -> None:
        self._on_card = on_card
        self._arch = arch
        self._chosen = chosen
        self._others = others
        self.differing: set[Arch] = set()

    def dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """native/Dropout.cpp: one kernel that keeps a mask of bools, where anything is dropped at random."""
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
        """native/Normalization.cpp, _batch_norm_impl_index: cuDNN's reads, and keeps, its input in its memory format: a
        copy where it is laid out in no format."""
        if self._on_card(x) and uses_batch_norm(x, weight, bias, mean, variance, training, epsilon, enabled).cudnn:
            x = in_own_format(x)
        return dispatch.composite(
            _ATEN.batch_norm.default, x, weight, bias, mean, variance, training, momentum, epsilon, enabled
        )

    def softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """native/SoftMax.cpp: from float16 to float32 without a copy in float32 first."""
        if dtype is torch.float32 and x.dtype is torch.float16 and self._on_card(x):
            return _ATEN._softmax.default(x, dim, True)
        return dispatch.composite(_ATEN.softmax.int, x, dim, dtype)

    def log_softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the same for its logarithm."""
        if dtype is torch.float32 and x.dtype is torch.float16 and self._on_card(x):
            return _ATEN._log_softmax.default(x, dim, True)
        return dispatch.composite(_ATEN.log_softmax.int, x, dim, dtype)

    def rms_norm(self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
        """native/layer_norm.cpp: one kernel, which keeps its input and one statistic in float32 a row.

        ``rms_norm`` itself stays as it is: it calls this one under the same conditions on every device.
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
        """native/transformers/attention.cpp: the kernel that `cuda_attention.choose` names, with its preparations."""
        if not self._on_card(query) or not _acceptable(query, key, value, attn_mask, is_causal):
            return dispatch.composite(
                _ATEN.scaled_dot_product_attention.default,
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        choice = sdpa_choice.choose(*given, arch=self._arch, enabled=enabled_now())
        self._compare(given, choice.kernel)
        self._chosen("scaled_dot_product_attention", f"{_TITLES[choice.kernel]}: {choice.reason}")
        if choice.kernel == "math":
            return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        added = query.dim() == 3
        if added:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        kernel = _KERNELS[choice.kernel]
        output = kernel(_Call(query, key, value, attn_mask, dropout_p, is_causal, scale))
        return output.squeeze(0) if added else output

    def _compare(self, given: tuple[Any, ...], kernel: str) -> None:
        """Note on which other cards attention takes another kernel, or none."""
        enabled = enabled_now()
        for other in self._others - self.differing:
            order = sdpa_choice.default_order(other, enabled.cudnn_version)
            try:
                same = sdpa_choice.choose(*given, arch=other, enabled=replace(enabled, order=order)).kernel == kernel
            except RuntimeError:
                same = False
            if not same:
                self.differing.add(other)

    def recurrent(self, name: str) -> Callable[..., Any]:
        """native/RNN.cpp: cuDNN's, with the weights in one buffer, which a module makes where it comes to the card."""
        op = getattr(_ATEN, name).input

        def run(x: torch.Tensor, states: Any, weights: list[torch.Tensor], *rest: Any) -> Any:
            if not self._on_card(x):
                return dispatch.composite(op, x, states, weights, *rest)
            against = self._against_recurrent(x)
            if against:
                self._chosen(name, f"{against}: not cuDNN's, and recorded with the CPU's parts")
                return dispatch.composite(op, x, states, weights, *rest)
            hx, cx = states if name == "lstm" else (states, None)
            output, hy, cy = _cudnn_recurrent(_RECURRENT[name], x, hx, cx, weights, *rest)
            return (output, hy, cy) if name == "lstm" else (output, hy)

        return run

    def _against_recurrent(self, x: torch.Tensor) -> str | None:
        """native/RNN.cpp, use_cudnn: why cuDNN does not take a recurrent network, None where it does."""
        if not torch.backends.cudnn.enabled:
            return "cuDNN is switched off"
        if x.dtype is torch.bfloat16 and self._arch < (8, 0):
            return "cuDNN takes bfloat16 from sm_80 on"
        return None if x.numel() else "the input is empty"

    def packed(self, name: str) -> Callable[..., Any]:
        """native/RNN.cpp: cuDNN's, of the steps of all sequences; how many have each lies in the host's memory."""
        op = getattr(_ATEN, name).data

        def run(data: torch.Tensor, sizes: torch.Tensor, states: Any, weights: list[torch.Tensor], *rest: Any) -> Any:
            if not self._on_card(data):
                return dispatch.composite(op, data, sizes, states, weights, *rest)
            against = self._against_recurrent(data)
            if not isinstance(sizes, FakeTensor) and not against:
                hx, cx = states if name == "lstm" else (states, None)
                with no_modes():
                    switches: tuple[Any, ...] = (*rest, False, sizes.tolist())
                output, hy, cy = _cudnn_recurrent(_RECURRENT[name], data, hx, cx, weights, *switches)
                return (output, hy, cy) if name == "lstm" else (output, hy)
            raise DataDependentError(
                f"{name} of a packed sequence, whose lengths are values, and recording has no values",
                expected="a recurrent network of padded sequences",
                do="Leave the sequences padded, or run memplan.measure(build): it really runs the step",
            )

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
        """native/RNN.cpp, LSTMCell: two products and one kernel for all gates, which keeps them."""
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
        """native/RNN.cpp, GRUCell: likewise."""
        if not self._on_card(x):
            return dispatch.composite(_ATEN.gru_cell.default, x, hidden, w_ih, w_hh, b_ih, b_hh)
        return _ATEN._thnn_fused_gru_cell.default(x @ w_ih.t(), hidden @ w_hh.t(), hidden, b_ih, b_hh)[0]

    def ctc_loss(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        steps: torch.Tensor,
        lengths: torch.Tensor,
        blank: int = 0,
        reduction: int = _MEAN,
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        """native/LossCTC.cpp: lengths are read on the host; a mean divides by those of the targets, on the card."""
        op, given = _ATEN.ctc_loss.Tensor, (log_probs, targets, steps, lengths, blank)
        if reduction != _MEAN or not self._on_card(log_probs) or self._on_card(lengths):
            return dispatch.composite(op, *given, reduction, zero_infinity)
        losses = dispatch.composite(op, *given, 0, zero_infinity)
        return (losses / losses.new_empty(lengths.shape).copy_(lengths).clamp_min(1)).mean()


_TITLES = {"flash": "flash", "efficient": "memory-efficient", "cudnn": "cuDNN", "math": "math"}


def _acceptable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> bool:
    """Return whether attention takes these at all; where it does not, its own implementation says so best."""
    if len({t.dtype for t in (query, key, value)}) > 1 or min(t.dim() for t in (query, key, value)) < 2:
        return False
    if any(t.is_nested for t in (query, key, value)):
        return False
    return mask is None or (not causal and mask.dtype in (torch.bool, torch.float32, query.dtype))


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of attention: (batch, heads, rows, size) each, a mask or none."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None

    @property
    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value


def _flash(call: _Call) -> torch.Tensor:
    """Heads are padded to a multiple of 8 first, and what is kept for backward is the padded tensors."""
    head = call.query.shape[-1]
    scale = 1 / math.sqrt(head) if call.scale is None else call.scale
    heads = [functional.pad(t, [0, -head % 8]) for t in call.heads] if head % 8 else call.heads
    kernel = _ATEN._scaled_dot_product_flash_attention.default
    output: torch.Tensor = kernel(*heads, call.dropout, call.causal, False, scale=scale)[0]
    return output[..., :head] if head % 8 else output


def _efficient(call: _Call) -> torch.Tensor:
    """Lay a mask out to be added: in the queries' dtype, its rows beginning at multiples of 8 elements."""
    mask = call.mask
    if mask is not None:
        aligned = _aligned(_additive(mask, call.query.dtype))
        mask = aligned.expand(*call.query.shape[:3], call.key.shape[2])
    kernel = _ATEN._scaled_dot_product_efficient_attention.default
    needed = _needs_gradient(*call.heads)
    return kernel(*call.heads, mask, needed, call.dropout, call.causal, scale=call.scale)[0]


def _cudnn(call: _Call) -> torch.Tensor:
    mask = None if call.mask is None else _additive(call.mask, call.query.dtype)
    kernel = _ATEN._scaled_dot_product_cudnn_attention.default
    needed = _needs_gradient(*call.heads)
    return kernel(*call.heads, mask, needed, call.dropout, call.causal, False, scale=call.scale)[0]


_KERNELS = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn}


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask of bools as one to add to the scores: 0 where it is true, minus infinity else."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, mask.new_full((), 0.0, dtype=dtype), -math.inf)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
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

    Not torch's own composite: for fake tensors that adds the mask to a copy of the scores, for real ones in place.
    """
    dtype = query.dtype
    added = None if mask is None else _additive(mask, dtype)
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if dtype in (torch.float16, torch.bfloat16) and not allowed:
        query, key, value = query.float(), key.float(), value.float()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    scaled = _ATEN.mul.Scalar(query, math.copysign(root, scale))  # as in C++: a scalar is no tensor that is kept
    if causal:
        square = (query.shape[-2], key.shape[-2])
        added = _additive(scaled.new_ones(square, dtype=torch.bool).tril(), scaled.dtype)
    if gqa:
        key, value = (_repeated(t, query.shape[-3]) for t in (key, value))
    weights = scaled @ _ATEN.mul.Scalar(key.transpose(-2, -1), root)
    if added is not None:
        weights.add_(added)
    weights = _ATEN._safe_softmax.default(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    output = (weights @ value).to(dtype)
    returned_too = weights.to(dtype)  # its second result, which nobody uses and which takes its memory all the same
    del returned_too
    return output


def _repeated(heads: torch.Tensor, wanted: int) -> torch.Tensor:
    return heads if heads.shape[-3] == wanted else heads.repeat_interleave(wanted // heads.shape[-3], -3)


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
    """cudnn/RNN.cpp, _cudnn_impl: output, last hidden states and last cells."""
    hidden = (hx if cx is None else cx).shape[2]
    projection = 0 if hx.shape[2] == hidden else hx.shape[2]
    number = (4 if biases else 2) + bool(projection)
    elements = rnn_weight_bytes(MODES[mode], x.shape[-1], hidden, layers, bidirectional, 1, projection)
    with torch.no_grad():
        # the weights lie in this one already: none of its bytes is new
        buffer = weights[0].detach().reshape(-1)[:1].expand(elements)
    return _ATEN._cudnn_rnn.default(
        x, weights, number, buffer, hx, cx, mode, hidden, projection, layers, batch_first, dropout, train,
        bidirectional, list(batch_sizes), None,
    )[:3]  # fmt: skip
