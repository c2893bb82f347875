"""`torch.autocast("cuda")` for tensors that stand for ones on the card while they lie on the CPU.

torch's kernels for autocast on CUDA leave CPU tensors alone, and those for the CPU have other lists. So kernels of
ours, at an unused key of the dispatcher, do what CUDA's do: they cast arguments, above autograd, and call the op again.
Which ops they are for, the running torch says itself; what is done to them is its policy: aten/src/ATen/autocast_mode.h
and autocast_mode.cpp of torch 2.11 to 2.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from memplan import _torch
from memplan._torch import dispatch
from memplan.errors import RecordingError

OnCard = Callable[[torch.Tensor], bool]

_ATEN = torch.ops.aten

_LOWER = """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FLOAT = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    linalg_matrix_sqrth
"""
_FLOAT_BY_DTYPE = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"


class Autocast:
    """What `torch.autocast("cuda")` does to ops while a step is recorded, and its copies of weights."""

    def __init__(self, on_card: OnCard) -> None:
        self._on_card = on_card
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._running = False

    def copies(self) -> list[torch.Tensor]:
        """Return the copies of weights in lower precision that are kept now."""
        return [copy for _, copy in self._copies.values()]

    def forget(self) -> None:
        """Let go of the copies, as torch does where the outermost autocast context ends."""
        self._copies.clear()

    def kernels(self) -> dict[str, dispatch.Kernel]:
        """Name of an op, of another library's with its namespace -> what stands above it."""
        # torch registers the one of cuDNN where it is built with cuDNN
        names = {*dispatch.autocast_ops(), "aten::_cudnn_rnn"}
        ops = {name.removeprefix("aten::"): dispatch.op_of(name) for name in names}
        return {name: self._kernel(op) for name, op in ops.items() if op is not None}

    def _kernel(self, op: Any) -> dispatch.Kernel:
        prepare = _POLICIES.get(op.overloadpacket.__name__, _unknown) if op.namespace == "aten" else _of_library

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with dispatch.below_autocast():
                if not self._any_on_card(args, kwargs):
                    return op(*args, **kwargs)
                outside, self._running = self._running, True
                try:
                    target, given, named = prepare(self, op, args, kwargs)
                    return target(*given, **named)
                finally:
                    self._running = outside

        return kernel

    @contextmanager
    def taking_apart(self) -> Iterator[None]:
        """Serve a dispatch mode that takes an op apart, as one has to in inference mode: its parts are cast as on CUDA.

        Inside of a dispatch mode nothing is cast. Here the parts are, unless the op is itself on the lists.
        """
        with nullcontext() if self._running else dispatch.above_autocast():
            yield

    def _any_on_card(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        return any(self._on_card(tensor) for tensor in _tensors((*args, *kwargs.values())))

    def takes(self, value: Any) -> bool:
        """Return whether autocast would cast it: a floating-point tensor on the card, no float64."""
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and self._on_card(value)
        )

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument, or each tensor in a list, in another dtype. The copy of a weight is kept and used
        again."""
        if isinstance(value, (list, tuple)):
            return [self.cast(item, dtype) for item in value]
        if not self.takes(value) or value.dtype is dtype:
            return value
        if not self._is_kept(value, dtype):
            return value.to(dtype)
        known = self._copies.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        with torch.enable_grad():  # the copy may be used again where gradients are asked for
            copy = value.to(dtype)
        self._copies[id(value)] = (weakref.ref(value), copy)
        return copy

    @staticmethod
    def _is_kept(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """autocast_mode.cpp, cached_cast: leaves in float32 that need a gradient, cast to the lower precision."""
        return (
            torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not dispatch.is_view(tensor)
            and not torch.is_inference_mode_enabled()
        )


@contextmanager
def installed(on_card: OnCard) -> Iterator[Autocast]:
    """`torch.autocast("cuda")` works on tensors that stand for ones on the card.

    ``torch.is_autocast_enabled("cuda")`` and its kin answer as ever: the state is torch's own. `torch.autocast` refuses
    to be enabled where ``torch.cuda.is_available()`` is not patched to say yes.

    Args:
        on_card: whether a tensor stands for one on the card. What a dispatch mode calls while it runs an op is not cast
            and not asked for.
    """
    state = Autocast(on_card)
    enable, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
    with dispatch.autocast_like_cuda(state.kernels()) as turn:

        def set_enabled(*args: Any, **kwargs: Any) -> None:
            enable(*args, **kwargs)
            turn(torch.is_autocast_enabled("cuda"))

        def clear_both() -> None:
            clear()
            state.forget()

        with _torch.patched(torch, set_autocast_enabled=set_enabled, clear_autocast_cache=clear_both):
            try:
                turn(torch.is_autocast_enabled("cuda"))
                yield state
            finally:
                state.forget()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


Prepared = tuple[Any, Sequence[Any], dict[str, Any]]
"""The op to call, its positional arguments and its keywords."""


def _cast_all(state: Autocast, op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Prepared:
    """Cast the last argument first: autocast_mode.h casts them as arguments of a call, which GCC evaluates so."""
    cast = {name: state.cast(value, dtype) for name, value in reversed(kwargs.items())}
    positional = [state.cast(value, dtype) for value in reversed(args)]
    return op, positional[::-1], cast


def _lower(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    return _cast_all(state, op, args, kwargs, torch.get_autocast_dtype("cuda"))


def _float(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    return _cast_all(state, op, args, kwargs, torch.float32)


def _float_by_dtype(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Ask an op that casts by itself for float32, unless the user asked it for another dtype."""
    if not state.takes(args[0]):
        return op, args, kwargs
    for position, argument in enumerate(_torch.arguments(op)):
        if argument.name == "dtype":
            if position < len(args) and not argument.kwarg_only:
                given = torch.float32 if args[position] is None else args[position]
                return op, [*args[:position], given, *args[position + 1 :]], kwargs
            given = kwargs.get("dtype")
            return op, args, {**kwargs, "dtype": torch.float32 if given is None else given}
    return op, args, kwargs


def _norm(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Replace the overloads without a dtype by those with one."""
    dtype = torch.float32 if state.takes(args[0]) else args[0].dtype
    given = [*args]
    for argument in _torch.arguments(op)[len(args) :]:
        given.append(kwargs.get(argument.name, argument.default_value))
    overload = str(op).rpartition(".")[2]
    overload = "ScalarOpt" if overload == "Scalar" else overload
    return getattr(_ATEN.norm, f"{overload}_dtype"), given, {"dtype": dtype}


def _widest(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """float32 where any of the tensors is, else the lower precision."""
    lower = torch.get_autocast_dtype("cuda")
    given = {t.dtype for t in _tensors((*args, *kwargs.values())) if state.takes(t)}
    if not given <= {torch.float32, lower}:
        others = ", ".join(sorted(str(dtype) for dtype in given - {torch.float32, lower}))
        raise RuntimeError(f"{op} got {others} while autocast gives {lower}: it takes float32 and what autocast gives")
    return _cast_all(state, op, args, kwargs, torch.float32 if torch.float32 in given else lower)


def _recurrent(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """cudnn/AutocastRNN.cpp: float16, whatever the dtype of autocast, with new copies of the weights at every call.

    torch puts the copies into one buffer; here each has its own.
    """
    half = torch.float16
    x, weights, stride, buffer, hx, cx, *rest = args
    if state.takes(weights[0]) and weights[0].dtype is not half:
        weights = [weight.to(half) for weight in weights]
        with torch.no_grad():
            buffer = weights[0].detach().reshape(-1)[:1].expand(buffer.numel())
    given = state.cast(x, half), weights, stride, buffer, state.cast(hx, half), state.cast(cx, half), *rest
    return op, given, kwargs


def _banned(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """torch's kernel raises its own message, whatever the tensors."""
    dispatch.with_cuda_autocast(op, *args, **kwargs)
    raise AssertionError(f"{op} is not refused by this torch")


def _of_library(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Cast as the op's library has registered it: seen on tensors without data."""
    try:
        given, made, handed_on = dispatch.cast_on_cuda(op, args, kwargs)
    except Exception as error:  # the library's kernel runs
        op(*args, **kwargs)  # what is wrong with the call itself is the user's to know
        raise RecordingError(
            f"how autocast on CUDA casts for {op} cannot be seen ({type(error).__name__}: {str(error)[:200]})",
            expected="an op with an implementation for tensors without data, which its kernel for autocast calls once",
            do="Run that op with autocast off, or run memplan.measure(build)",
        ) from error
    leaves, form = _torch.tree_flatten((args, kwargs))
    cast = [one if dtype is None else state.cast(one, dtype) for one, dtype in zip(leaves, given, strict=True)]
    positional, named = _torch.tree_unflatten(cast, form)

    def run(*args: Any, **kwargs: Any) -> Any:
        results, form = _torch.tree_flatten(op(*args, **kwargs))
        casts = zip(results, made, handed_on, strict=True)
        return _torch.tree_unflatten(
            [one if to is None or own is to else state.cast(one, to) for one, own, to in casts], form
        )

    return run, positional, named


def _unknown(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    raise RecordingError(
        f"autocast on CUDA treats {op}, and how is not known here",
        expected=f"an op that autocast treated in the versions of torch up to 2.15; this one is {torch.__version__}",
        do="Run that op with autocast off, or run memplan.measure(build)",
    )


_POLICIES: dict[str, Callable[[Autocast, Any, Any, Any], Prepared]] = {
    **dict.fromkeys(_LOWER.split(), _lower),
    **dict.fromkeys(_FLOAT.split(), _float),
    **dict.fromkeys(_FLOAT_BY_DTYPE.split(), _float_by_dtype),
    **dict.fromkeys(_WIDEST.split(), _widest),
    "norm": _norm,
    "_cudnn_rnn": _recurrent,
    "binary_cross_entropy": _banned,
}
"""Name of an op -> how its arguments are prepared."""
