"""Which kernel `scaled_dot_product_attention` runs on CUDA, and why.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h of torch 2.11 to 2.15. Two sets of
rules: those up to torch 2.13, and those of 2.15, which 2.14 is assumed to share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from memplan.cudnn.cudnn_library import VERSION_OF_TORCH

Kernel = Literal["flash", "efficient", "cudnn", "math"]
Arch = tuple[int, int]
"""A card's compute capability: (9, 0) is sm_90."""

_HALF, _BF16, _FLOAT = torch.float16, torch.bfloat16, torch.float32
_DEFAULT: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
_CUDNN_FIRST: tuple[Kernel, ...] = ("cudnn", "flash", "efficient", "math")
_NAMES = {
    "flash": "flash attention",
    "efficient": "memory-efficient attention",
    "cudnn": "cuDNN's attention",
    "math": "the math path",
}
_TORCH_2_14 = (2, 14)


@dataclass(frozen=True, slots=True)
class Enabled:
    """The kernels that `scaled_dot_product_attention` may choose: `torch.backends.cuda`, `torch.nn.attention`.

    ``order`` is the order in which kernels are tried; ``deterministic`` excludes cuDNN, whose attention is not
    deterministic. ``torch`` and ``cudnn_version`` are versions: (2, 13), and 92000 for 9.20.0.
    """

    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    math: bool = True
    order: tuple[Kernel, ...] = _DEFAULT
    deterministic: bool = False
    torch: tuple[int, int] = (2, 13)
    cudnn_version: int = 92000


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, and the reason for its choice as a sentence without a full stop."""

    kernel: Kernel
    reason: str


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of attention, the card and the settings."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    arch: Arch
    enabled: Enabled
    training: bool

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def since_2_14(self) -> bool:
        return self.enabled.torch >= _TORCH_2_14


def default_order(arch: Arch, cudnn_version: int) -> tuple[Kernel, ...]:
    """Return the order in which torch tries the kernels unless the user sets an order.

    cuDNN is first on sm_90, sm_100 and sm_103 with cuDNN later than 9.15. ``cudnn_version``: 91500 is 9.15.0.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return _DEFAULT
    preferred = arch[0] in (9, 10) and arch[1] in (0, 3) and cudnn_version > 91500
    return _CUDNN_FIRST if preferred else _DEFAULT


@cache
def versions() -> tuple[tuple[int, int], int]:
    """Return the version of this torch as (major, minor), and of the cuDNN with which it runs on CUDA: 91500 is 9.15.0.

    A torch without CUDA has no cuDNN: then that of its PyPI wheel for CUDA.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    table = VERSION_OF_TORCH.get((major, minor), max(VERSION_OF_TORCH.values()))
    installed = torch.backends.cudnn.version() if torch.version.cuda else None
    return (major, minor), installed or table


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    arch: Arch,
    enabled: Enabled,
) -> Choice:
    """The kernel that `scaled_dot_product_attention` would run on a card of this architecture, and the reason.

    Args:
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa: the arguments of the call. Whether a backward
            pass is needed is read from the tensors and the grad mode.
        arch: the card's compute capability.
        enabled: the kernels that the user allows.

    Raises:
        RuntimeError: no kernel supports the arguments, as in torch.
    """
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    call = _Call(query, key, value, mask, dropout_p, is_causal, enable_gqa, arch, enabled, training)
    if call.since_2_14 and all(t.dim() == 3 for t in call.all):
        call = _batched(call)
    objections: list[str] = []
    for kernel in enabled.order:
        if not getattr(enabled, kernel):
            objections.append(f"{_NAMES[kernel]} is switched off")
            continue
        objection = next(_OBJECTIONS[kernel](call), None)
        if objection is None:
            return Choice(kernel, _reason(kernel, objections))
        objections.append(objection)
    raise RuntimeError(f"No available kernel for scaled_dot_product_attention on {_sm(arch)}: {'; '.join(objections)}.")


def _reason(kernel: Kernel, objections: list[str]) -> str:
    """Return why a kernel runs: the ``objections`` to the kernels that torch tries before it, if any."""
    if objections:
        return "; ".join(dict.fromkeys(objections))
    return f"the first that is tried, and nothing speaks against {_NAMES[kernel]}"


def _batched(call: _Call) -> _Call:
    """Return the call with a batch dimension of size 1, which torch adds since 2.14."""
    query, key, value = (t.unsqueeze(0) for t in call.all)
    mask = call.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return replace(call, query=query, key=key, value=value, mask=mask)


def _flash_objections(call: _Call) -> Iterator[str]:
    """Yield each reason why flash attention cannot run a call."""
    head = call.query.shape[-1]
    yield from _dimension_objections(call)
    if call.mask is not None:
        yield "a mask is given, which flash attention does not take"
    if len({t.shape[-1] for t in call.all}) > 1:
        yield f"heads of unequal sizes ({_head_sizes(call)}), which flash attention does not take"
    if head > 256:
        yield f"heads of {head}, and flash attention takes up to 256"
    if not (8, 0) <= call.arch <= (12, 1):
        yield f"flash attention needs sm_80 or later, and this is {_sm(call.arch)}"
    if call.training and ((8, 6) <= call.arch <= (8, 9) or (12, 0) <= call.arch <= (12, 1)):
        if 192 < head <= 224:
            yield f"heads of {head}, and flash attention has no backward for 193 to 224 on {_sm(call.arch)}"
        if head > 224 and call.dropout > 0:
            yield f"heads of {head} with dropout, and flash attention has no backward for them on {_sm(call.arch)}"
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        yield "causal with queries and keys of different lengths, which flash attention does not take"
    yield from _precision_objections(call, "flash attention")
    yield from _head_count_objections(call, "flash attention", gqa=True)
    yield from _empty_objections(call)
    yield from _stride_objections(call, "flash attention", size_one=True)


def _efficient_objections(call: _Call) -> Iterator[str]:
    """Yield each reason why memory-efficient attention cannot run a call."""
    name = "memory-efficient attention"
    if not (5, 0) <= call.arch <= (12, 1):
        yield f"{name} needs sm_50 to sm_121, and this is {_sm(call.arch)}"
    yield from _dimension_objections(call)
    multiple = _alignment(call)
    head, value_head = call.query.shape[-1], call.value.shape[-1]
    if head != call.key.shape[-1]:
        yield f"queries and keys of unequal head sizes ({_head_sizes(call)}), which {name} does not take"
    if head % multiple or value_head % multiple or not head or not value_head:
        yield f"heads of {head}, and {name} takes multiples of {multiple} in {_short(call.query.dtype)}"
    if call.since_2_14 and call.arch >= (8, 0) and any(_misaligned(t, multiple) for t in call.all):
        yield f"a query, key or value that starts inside its storage at no multiple of {multiple} elements"
    yield from _empty_objections(call)
    yield from _stride_objections(call, name, size_one=False)
    yield from _head_count_objections(call, name, gqa=call.since_2_14)
    dtypes = (_HALF, _FLOAT, _BF16) if call.arch >= (8, 0) else (_HALF, _FLOAT)
    yield from _dtype_objections(call, name, dtypes)


def _cudnn_objections(call: _Call) -> Iterator[str]:
    """Yield each reason why cuDNN's attention cannot run a call."""
    name = "cuDNN's attention"
    if call.dropout > 0 and 91100 < call.enabled.cudnn_version < 91400:
        yield f"dropout, which {name} does not take in cuDNN 9.11 to 9.13"
    yield from _dimension_objections(call)
    if call.enabled.deterministic:
        yield f"deterministic algorithms are asked for, and {name} is none"
    yield from _precision_objections(call, name)
    yield from _mask_objections(call, name)
    if not (8, 0) <= call.arch <= (12, 1):
        yield f"{name} needs sm_80 or later, and this is {_sm(call.arch)}"
    if call.since_2_14 and (call.dropout * 16) % 1:
        yield f"dropout {call.dropout:g}, and {name} takes multiples of 1/16"
    yield from _empty_objections(call)
    yield from _stride_objections(call, name, size_one=True)
    yield from _head_count_objections(call, name, gqa=True, equal_kv=False)
    yield from _cudnn_shape_objections(call, name)


def _cudnn_shape_objections(call: _Call, name: str) -> Iterator[str]:
    """Yield each size (of heads, batch or sequences) that cuDNN's attention does not take."""
    batch, heads, length = call.query.shape[:3]
    if call.since_2_14 and max(batch, heads) > 65535:
        yield f"{max(batch, heads)} batch entries or heads, and {name} takes up to 65535"
    head, value_head = call.query.shape[-1], call.value.shape[-1]
    limit = _cudnn_head_limit(call)
    if max(head, value_head) > limit:
        yield f"heads of {max(head, value_head)}, and {name} takes up to {limit} on {_sm(call.arch)}"
    if head % 8 or value_head % 8:
        yield f"heads of {head}, and {name} takes multiples of 8"
    if call.key.shape[2] == 1:
        yield f"a single key, which {name} does not take"
    if call.dropout and length == 1:
        yield f"a single query with dropout, which {name} does not take"
    if call.since_2_14 and call.training and limit == 256:
        both = (head, value_head)
        if max(both) > 128 and both not in ((192, 128), (256, 256)):
            yield f"heads of {head} and {value_head}, for which {name} has no backward"


def _cudnn_head_limit(call: _Call) -> int:
    """Return the largest head size that cuDNN's attention takes, by torch, card and cuDNN's version (91100 is 9.11.0).

    Heads of 192 for queries and 128 for values have a limit of their own, from cuDNN 9.11 on.
    """
    version, major = call.enabled.cudnn_version, call.arch[0]
    is_192_by_128 = version >= 91100 and call.query.shape[-1] == 192 and call.value.shape[-1] == 128
    if not call.since_2_14:
        if call.arch == (9, 0):
            return 256 if version >= 91000 else 128
        return 192 if major == 10 and is_192_by_128 else 128
    if call.arch != (9, 0) and major != 10:
        return 128
    if version > 92200 and not (call.arch == (10, 7) and version <= 92500):
        return 256
    return 192 if is_192_by_128 else 128


_OBJECTIONS: dict[Kernel, Callable[[_Call], Iterator[str]]] = {
    "flash": _flash_objections,
    "efficient": _efficient_objections,
    "cudnn": _cudnn_objections,
    "math": lambda call: iter(()),  # the math path runs any call
}


def _dimension_objections(call: _Call) -> Iterator[str]:
    """Yield an objection unless query, key and value have four dimensions."""
    if any(t.dim() != 4 for t in call.all):
        shown = " and ".join(str(n) for n in sorted({t.dim() for t in call.all}))
        yield f"tensors of {shown} dimensions, and the fused kernels take 4"


def _precision_objections(call: _Call, name: str) -> Iterator[str]:
    """Yield an objection to operands that are not in half precision, or in bfloat16 before sm_80."""
    yield from _dtype_objections(call, name, (_HALF, _BF16) if call.arch >= (8, 0) else (_HALF,))


def _dtype_objections(call: _Call, name: str, supported: tuple[torch.dtype, ...]) -> Iterator[str]:
    """Yield an objection unless query, key and value all have the same dtype, and it is supported."""
    dtypes = dict.fromkeys(t.dtype for t in call.all)
    if len(dtypes) > 1 or call.query.dtype not in supported:
        shown = " and ".join(_short(dtype) for dtype in dtypes)
        yield f"{shown}, and {name} takes {_or([_short(dtype) for dtype in supported])} on {_sm(call.arch)}"


def _head_count_objections(call: _Call, name: str, *, gqa: bool, equal_kv: bool = True) -> Iterator[str]:
    """Yield each difference in batch sizes or numbers of heads that a kernel does not take.

    ``gqa``: whether the kernel takes grouped queries. ``equal_kv``: whether keys and values then need as many heads.
    """
    if len({t.shape[0] for t in call.all}) > 1:
        yield "query, key and value of different batch sizes, which no fused kernel takes"
    query, key, value = (t.shape[-3] for t in call.all)
    if call.gqa and gqa:
        if equal_kv and key != value:
            yield f"key and value of different numbers of heads, which {name} does not take"
        if not key or not value or query % key or query % value:
            yield f"{query} query heads are no multiple of {key} key heads"
        return
    broadcast = call.since_2_14 and query > 0 and key == value == 1  # a single head of keys and values
    if not broadcast and not query == key == value:
        grouped = " (grouped queries)" if call.gqa else ""
        yield f"{query} query heads and {key} key heads{grouped}, which {name} does not take"


def _empty_objections(call: _Call) -> Iterator[str]:
    """Yield an objection if there are no queries or no keys."""
    if not call.query.shape[-2] or not call.key.shape[-2]:
        yield "an empty sequence, which no fused kernel takes"


def _stride_objections(call: _Call, name: str, *, size_one: bool) -> Iterator[str]:
    """Yield an objection if the last dimension of heads or mask is not contiguous.

    ``size_one``: whether the kernel takes heads of size 1 with any stride.
    """
    if any(t.stride(-1) != 1 for t in call.all) and not (size_one and call.query.shape[-1] == 1):
        yield f"the elements of a head are not contiguous, which {name} does not take"
    if call.mask is not None and call.mask.stride(-1) != 1:
        yield f"the mask's last dimension is not contiguous, which {name} does not take"


def _mask_objections(call: _Call, name: str) -> Iterator[str]:
    """Yield an objection if a mask needs a gradient, or has a shape that the kernel does not take."""
    mask = call.mask
    if mask is None:
        return
    if mask.requires_grad:
        yield f"the mask needs a gradient, which {name} does not give"
    scores_shape = (*call.query.shape[:3], call.key.shape[2])
    # dimensions are aligned at the last one, as in broadcasting
    broadcasts = all(n in (1, m) for n, m in zip(mask.shape[::-1], scores_shape[::-1], strict=False))
    if mask.dim() not in (2, 4) or not broadcasts:
        yield f"a mask of shape {tuple(mask.shape)}, which {name} does not take"


def _alignment(call: _Call) -> int:
    """Return the number of elements that the head size has to be a multiple of for memory-efficient attention.

    Source: sdp_utils.cpp, minimum_gemm_alignment: tensor cores load 16 bytes at a time.
    """
    half = call.query.dtype in (_HALF, _BF16)
    if call.arch >= (8, 0) or (call.arch >= (7, 0) and half):
        return 8 if half else 4
    return 1


def _misaligned(tensor: torch.Tensor, multiple: int) -> bool:
    return tensor.numel() > 0 and bool(tensor.storage_offset() % multiple)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sm(arch: Arch) -> str:
    return f"sm_{arch[0]}{arch[1]}"


def _head_sizes(call: _Call) -> str:
    return ", ".join(str(t.shape[-1]) for t in call.all)


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
