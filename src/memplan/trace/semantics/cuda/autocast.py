"""`torch.autocast("cuda")` for CPU tensors that represent tensors on the card.

torch's CUDA autocast kernels ignore CPU tensors, and those of the CPU have other op lists. So we register kernels at an
unused dispatch key that do the same as CUDA's: cast the arguments, above autograd, and call the op again. The list of
ops comes from the running torch; the policy of each is that of aten/src/ATen/autocast_mode.h and autocast_mode.cpp of
torch 2.11 to 2.15.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
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
    """The state of CUDA autocast during a recording, with its cache of weight casts."""

    def __init__(self, on_card: OnCard) -> None:
        """``on_card`` returns whether a tensor represents one on the card: others are not cast."""
        self._on_card = on_card
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """(weight, its copy in low precision) by id() of the weight."""
        self._running = False
        """Whether an autocast kernel runs: the arguments of its op are cast already."""

    def copies(self) -> list[torch.Tensor]:
        """The cached low-precision copies of weights."""
        return [copy for _, copy in self._copies.values()]

    def clear(self) -> None:
        """Clear the cache of casts, as torch does when the outermost autocast context ends."""
        self._copies.clear()

    def kernels(self) -> dict[str, dispatch.Kernel]:
        """Op name (qualified by its namespace unless ``aten``) -> the autocast kernel to register for it."""
        # torch registers this one only if it is built with cuDNN
        names = {*dispatch.autocast_ops(), "aten::_cudnn_rnn"}
        ops = {name.removeprefix("aten::"): dispatch.op_of(name) for name in names}
        return {name: self._kernel(op) for name, op in ops.items() if op is not None}

    def _kernel(self, op: Any) -> dispatch.Kernel:
        """Return the autocast kernel of an op: it casts by the op's policy and calls the op below autocast."""
        policy = (
            _POLICIES.get(op.overloadpacket.__name__, _refuse_unknown) if op.namespace == "aten" else _cast_as_library
        )

        def kernel(*args: Any, **kwargs: Any) -> Any:
            """Cast the arguments if any is on the card, and call the op below autocast."""
            with dispatch.below_autocast():
                if not any(self._on_card(tensor) for tensor in _tensors((*args, *kwargs.values()))):
                    return op(*args, **kwargs)
                was_running, self._running = self._running, True
                try:
                    target, cast_args, cast_kwargs = policy(self, op, args, kwargs)
                    return target(*cast_args, **cast_kwargs)
                finally:
                    self._running = was_running

        return kernel

    @contextmanager
    def taking_apart(self) -> Iterator[None]:
        """Context for a dispatch mode that decomposes a composite op (inference mode): its parts are cast as on CUDA.

        Within a dispatch mode nothing is cast. Here the parts are, unless an autocast kernel has cast for the whole op.
        """
        with nullcontext() if self._running else dispatch.above_autocast():
            yield

    def would_cast(self, value: Any) -> bool:
        """Whether autocast would cast ``value``: a floating-point tensor on the card, other than float64."""
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and self._on_card(value)
        )

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return a tensor, or each tensor of a list, in another dtype. Casts of weights are cached."""
        if isinstance(value, (list, tuple)):
            return [self.cast(item, dtype) for item in value]
        if not self.would_cast(value) or value.dtype is dtype:
            return value
        if not self._is_cacheable(value, dtype):
            return value.to(dtype)
        weight_ref, copy = self._copies.get(id(value), (None, None))
        if weight_ref is not None and weight_ref() is value:  # else the id is that of a freed weight
            return copy  # without a look at its dtype, as in torch: only autocast's own dtype is cacheable
        with torch.enable_grad():  # the cached copy may be reused where gradients are needed
            copy = value.to(dtype)
        self._copies[id(value)] = (weakref.ref(value), copy)
        return copy

    @staticmethod
    def _is_cacheable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the cast of a tensor is cached: of float32 leaves that need a gradient, to the lower precision.

        Source: autocast_mode.cpp, cached_cast.
        """
        return (
            torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not _torch.is_view(tensor)
            and not torch.is_inference_mode_enabled()
        )


@contextmanager
def installed(on_card: OnCard) -> Iterator[Autocast]:
    """Make `torch.autocast("cuda")` work on CPU tensors that represent tensors on the card.

    ``torch.is_autocast_enabled("cuda")`` and its kin are unaffected: the state is torch's own. `torch.autocast` can be
    enabled only if ``torch.cuda.is_available()`` is patched to return True.

    Args:
        on_card: whether a tensor represents one on the card. Not called for ops that a dispatch mode runs: those are
            not cast.
    """
    state = Autocast(on_card)
    torch_set_enabled, torch_clear = torch.set_autocast_enabled, torch.clear_autocast_cache
    with dispatch.autocast_like_cuda(state.kernels()) as set_active:

        def set_enabled(*args: Any, **kwargs: Any) -> None:
            """Replace `torch.set_autocast_enabled`: enable or disable the kernels of CUDA's autocast, too."""
            torch_set_enabled(*args, **kwargs)
            set_active(torch.is_autocast_enabled("cuda"))

        def clear_caches() -> None:
            """Replace `torch.clear_autocast_cache`: clear the cache of CUDA's casts, too."""
            torch_clear()
            state.clear()

        with _torch.patched(torch, set_autocast_enabled=set_enabled, clear_autocast_cache=clear_caches):
            try:
                set_active(torch.is_autocast_enabled("cuda"))
                yield state
            finally:
                state.clear()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


Prepared = tuple[Any, Sequence[Any], dict[str, Any]]
"""The op to call, its positional arguments and its keywords."""


def _cast_all(state: Autocast, op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Prepared:
    """Return the call with all tensors cast to ``dtype``.

    The last argument is cast first: so does GCC, which compiles the call in autocast_mode.h.
    """
    cast = {name: state.cast(value, dtype) for name, value in reversed(kwargs.items())}
    positional = [state.cast(value, dtype) for value in reversed(args)]
    return op, positional[::-1], cast


def _cast_to_lower(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Return the call with all tensors cast to the dtype of autocast, such as float16."""
    return _cast_all(state, op, args, kwargs, torch.get_autocast_dtype("cuda"))


def _set_dtype_argument(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Pass ``dtype=torch.float32`` to an op that casts by itself, unless the user passed another dtype."""
    if not state.would_cast(args[0]):
        return op, args, kwargs
    for position, argument in enumerate(_torch.arguments(op)):
        if argument.name != "dtype":
            continue
        if position < len(args) and not argument.kwarg_only:
            dtype = torch.float32 if args[position] is None else args[position]
            return op, [*args[:position], dtype, *args[position + 1 :]], kwargs
        dtype = kwargs.get("dtype")
        return op, args, {**kwargs, "dtype": torch.float32 if dtype is None else dtype}
    return op, args, kwargs


def _norm_with_dtype(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Call the overload of ``norm`` that has a dtype argument instead, e.g. ``ScalarOpt_dtype`` for ``ScalarOpt``."""
    dtype = torch.float32 if state.would_cast(args[0]) else args[0].dtype
    missing = _torch.arguments(op)[len(args) :]
    arguments = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in missing)]
    overload = str(op).rpartition(".")[2]
    overload = "ScalarOpt" if overload == "Scalar" else overload  # norm.Scalar_dtype does not exist
    return getattr(_ATEN.norm, f"{overload}_dtype"), arguments, {"dtype": dtype}


def _cast_to_widest(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Cast to float32 if any of the tensors is in float32, else to the autocast dtype."""
    lower = torch.get_autocast_dtype("cuda")
    dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if state.would_cast(t)}
    if not dtypes <= {torch.float32, lower}:
        others = ", ".join(sorted(str(dtype) for dtype in dtypes - {torch.float32, lower}))
        raise RuntimeError(f"{op} got {others} while autocast gives {lower}: it takes float32 and what autocast gives")
    return _cast_all(state, op, args, kwargs, torch.float32 if torch.float32 in dtypes else lower)


def _cast_recurrent(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Cast a recurrent network's tensors to float16, whatever the autocast dtype; weights are copied at every call.

    torch copies them into one buffer; here each has its own. Source: cudnn/AutocastRNN.cpp.
    """
    half = torch.float16
    x, weights, stride, buffer, hx, cx, *options = args
    if state.would_cast(weights[0]) and weights[0].dtype is not half:
        weights = [weight.to(half) for weight in weights]
        with torch.no_grad():  # an expanded element has the size of the buffer, and allocates nothing
            buffer = weights[0].detach().reshape(-1)[:1].expand(buffer.numel())
    arguments = state.cast(x, half), weights, stride, buffer, state.cast(hx, half), state.cast(cx, half), *options
    return op, arguments, kwargs


def _refuse(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Call torch's own kernel, which raises torch's message for any tensors."""
    dispatch.with_cuda_autocast(op, *args, **kwargs)
    raise AssertionError(f"{op} is not refused by this torch")


def _cast_as_library(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Cast as the autocast kernel of the op's library does, which is observed on tensors without data."""
    try:
        # of each argument and result, None if it is no tensor: the dtype to cast to, before and after the op
        arg_dtypes, op_dtypes, returned_dtypes = dispatch.cast_on_cuda(op, args, kwargs)
    except Exception as error:  # raised by the library's kernel
        op(*args, **kwargs)  # if the call itself is wrong, this raises the library's own error
        raise RecordingError(
            f"how autocast on CUDA casts for {op} cannot be seen ({type(error).__name__}: {str(error)[:200]})",
            expected="an op with an implementation for tensors without data, which its kernel for autocast calls once",
            do="Run that op with autocast off, or run memplan.measure(build)",
        ) from error
    leaves, spec = _torch.tree_flatten((args, kwargs))
    cast = [leaf if dtype is None else state.cast(leaf, dtype) for leaf, dtype in zip(leaves, arg_dtypes, strict=True)]
    cast_args, cast_kwargs = _torch.tree_unflatten(cast, spec)

    def op_with_cast_results(*args: Any, **kwargs: Any) -> Any:
        """Call the op, and cast its results as the library's autocast kernel does."""
        results, spec = _torch.tree_flatten(op(*args, **kwargs))
        for i, (op_dtype, returned) in enumerate(zip(op_dtypes, returned_dtypes, strict=True)):
            if returned is not None and returned is not op_dtype:
                results[i] = state.cast(results[i], returned)
        return _torch.tree_unflatten(results, spec)

    return op_with_cast_results, cast_args, cast_kwargs


def _refuse_unknown(state: Autocast, op: Any, args: Any, kwargs: Any) -> Prepared:
    """Raise an error for an op that autocast treats, and whose policy is not in `_POLICIES`."""
    raise RecordingError(
        f"autocast on CUDA treats {op}, and how is not known here",
        expected=f"an op that autocast treated in the versions of torch up to 2.15; this one is {torch.__version__}",
        do="Run that op with autocast off, or run memplan.measure(build)",
    )


_POLICIES: dict[str, Callable[[Autocast, Any, Any, Any], Prepared]] = {
    **dict.fromkeys(_LOWER.split(), _cast_to_lower),
    **dict.fromkeys(_FLOAT.split(), partial(_cast_all, dtype=torch.float32)),
    **dict.fromkeys(_FLOAT_BY_DTYPE.split(), _set_dtype_argument),
    **dict.fromkeys(_WIDEST.split(), _cast_to_widest),
    "norm": _norm_with_dtype,
    "_cudnn_rnn": _cast_recurrent,
    "binary_cross_entropy": _refuse,
}
