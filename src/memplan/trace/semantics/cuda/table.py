"""What an op takes on a CUDA card besides what a fake tensor of the CPU shows: the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memplan.cudnn.questions import Question
from memplan.devices import Device
from memplan.trace.semantics.cpu import sparse, sparse_results
from memplan.trace.semantics.cuda import cublas, cudnn, encoder_fast_path, kernels, results
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.cudnn_convolution import around, convolution_workspace
from memplan.trace.semantics.cuda.cudnn_questions import questions
from memplan.trace.semantics.kinds import Arguments, Asked, Extra, Keywords, Semantics
from memplan.trace.semantics.layout import bytes_of, is_dense

_COPIES = frozenset({"aten._to_copy.default", "aten.copy_.default"})
_GROUPED = "aten._grouped_mm.default"
_INDEXED = frozenset(
    {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"}
)


def semantics(
    device: Device, stream: Callable[[], int], on_card: Callable[[torch.Tensor], bool], asks: bool = False
) -> Semantics:
    """Return the semantics of one recording for a card: which workspaces are there already is its state.

    ``stream()`` tells the number of the current stream, ``on_card`` whether a tensor lies on the card; ``asks``: cuDNN
    is asked for workspaces of convolutions when the recording is over.
    """
    extras = _Kernels(device, stream, on_card, asks).extras
    return Semantics(extras, results.RESULTS, {**results.INSTEAD, **sparse_results.INSTEAD}, _assumed, results.ORDER)


def _assumed(name: str, args: Arguments, result: Any, answered: bool) -> str | None:
    """Say what of a sparse result is assumed as on the CPU, and that CUDA's kernels may take more beside it."""
    if name in sparse.FORMULAS and sparse.concerns(name, args, result):
        return "what kernels on sparse tensors take beside their results is not known on a card and NOT COUNTED"
    return sparse_results.assumed(name, args, result, answered)


def is_own(name: str) -> bool:
    """Return whether CUDA computes an op by a library or a kernel of its own, rather than as the CPU does, only
    elsewhere."""
    return name in cublas.USES or name.startswith(_CHOSEN)


_CHOSEN = (
    "aten.convolution",
    "aten.native_batch_norm",
    "aten._scaled_dot_product",
    "aten.bernoulli_",
    "aten.native_dropout",
    "aten.mkldnn_rnn_layer",
)


class _Kernels:
    def __init__(
        self, device: Device, stream: Callable[[], int], on_card: Callable[[torch.Tensor], bool], asks: bool
    ) -> None:
        self._asks = asks
        self._tried: set[tuple[Question, bool]] = set()
        self._arch = Arch(device.architecture, device.multiprocessors)
        self._stream = stream
        self._on_card = on_card
        self._dropout_states = False
        self._held: set[tuple[cublas.Library, bool, int]] = set()
        self._libraries: dict[str, Callable[[Arguments, Any, bool], list[Extra]]] = {
            "aten.convolution.default": self._convolution,
            "aten.convolution_backward.default": self._convolution_backward,
            "aten.native_batch_norm.default": self._batch_norm,
            "aten.native_batch_norm_backward.default": self._batch_norm_backward,
            "aten._cudnn_rnn.default": self._recurrent,
            "aten._cudnn_rnn_backward.default": _recurrent_backward,
        }

    def extras(self, name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool) -> list[Extra]:
        """Return the storages that an op's kernel takes for itself."""
        found: list[Extra] = []
        if name in cublas.USES or name in encoder_fast_path.OPS or self._is_loop(name, args):
            found += self._products(name, args, kwargs, result, in_backward)
        if name in encoder_fast_path.OPS:
            found.append(Extra(encoder_fast_path.temporaries(name, args, kwargs, result, self._arch.capability)))
        library = self._libraries.get(name)
        if library is not None:
            found += [extra for extra in library(args, result, in_backward) if extra.bytes or extra.asked]
        if name in _COPIES:
            found += self._copied_across(args, result)
        if name in _INDEXED:  # TensorAdvancedIndexing.cpp: indices in the host's memory are copied first
            on_host = [i for i in args[1] if i is not None and i.numel() and not self._on_card(i)]
            found += [Extra(bytes_of(i), first=True) for i in on_host]
        formula = kernels.FORMULAS.get(name)
        if formula is not None and not any(extra.asked for extra in found):  # its copies are among these
            taken = [size for size in formula(args, kwargs, result, self._arch) if size]
            found += [size if isinstance(size, Extra) else Extra(size) for size in taken]
        return found

    def _is_loop(self, name: str, args: Arguments) -> bool:
        """cuda/GroupedBlas.cpp, _grouped_mm_cuda: but for bfloat16 from Hopper on, it is a product for each group."""
        return name == _GROUPED and not (self._arch.capability[0] in (9, 10) and args[0].dtype is torch.bfloat16)

    def _copied_across(self, args: Arguments, target: torch.Tensor) -> list[Extra]:
        """Copy.cu, copy_requires_temporaries: between host and card only the same layout is copied as it is."""
        in_place = args[0] is target
        source = args[1] if in_place else args[0]
        # a new tensor is not in the books yet: it is made on the card, else nobody would ask here
        to_card, from_card = not in_place or self._on_card(target), self._on_card(source)
        plain = source.stride() == target.stride() and is_dense(target) and source.shape == target.shape
        if to_card == from_card or (plain and source.dtype is target.dtype):
            return []
        here = target if to_card else source
        return [] if here.is_contiguous() else [Extra(here.numel() * here.element_size(), first=True)]

    def _products(
        self, name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
    ) -> Iterator[Extra]:
        """Workspaces of cuBLAS: a handle for each thread, and the backward pass has one of its own."""
        own = name in encoder_fast_path.OPS or name == _GROUPED
        library = "cublas" if own else cublas.library(name, args, kwargs, result)
        if library is None:
            return
        yield from self._taken(library, in_backward)

    def _taken(self, library: cublas.Library, in_backward: bool) -> Iterator[Extra]:
        # read where a real handle would be made: importing a library may have set it (MONAI sets :4096:8)
        held = cublas.kept(os.environ)
        for owner, size in cublas.taken(library, self._arch.capability, os.environ).items():
            key = owner, in_backward, self._stream()
            if not held or key not in self._held:
                self._held.add(key)
                yield Extra(size, held=held, workspace=True)

    def _convolution(self, args: Arguments, result: Any, in_backward: bool) -> list[Extra]:
        return self._workspace_of(args, result, in_backward, backward=False)

    def _convolution_backward(self, args: Arguments, result: Any, in_backward: bool) -> list[Extra]:
        return self._workspace_of(args, result, in_backward, backward=True)

    def _workspace_of(self, args: Arguments, result: Any, in_backward: bool, *, backward: bool) -> list[Extra]:
        benchmark = torch.backends.cudnn.benchmark
        taken = convolution_workspace(args, result, self._arch, benchmark=benchmark, backward=backward)
        low = taken.low if taken.low != taken.high else None
        asked = questions(args, result, backward=backward) if taken.cudnn and self._asks else []
        if asked:
            return around(args, self._arch, backward=backward) + [
                Extra(taken.high, low=low, workspace=True, asked=self._asked(question, in_backward), after=position)
                for position, question in asked
            ]
        own = Extra(taken.high, low=low, workspace=True)
        return [*(self._taken("cublas", in_backward) if taken.product else ()), own]

    def _asked(self, question: Question, in_backward: bool) -> Asked:
        """native/cudnn/Conv_v8.cpp: with benchmark a thread tries all plans once, and remembers the fastest."""
        if not torch.backends.cudnn.benchmark:
            return Asked(question, "first")
        tried = (question, in_backward) in self._tried
        self._tried.add((question, in_backward))
        return Asked(question, "any" if tried else "largest")

    def _batch_norm(self, args: Arguments, result: Any, in_backward: bool) -> list[Extra]:
        """Return where cuDNN's is taken: a reserve that lives as long as the statistics, and a workspace."""
        x, weight, bias, mean, variance, training, _, epsilon = args
        enabled = torch.backends.cudnn.enabled
        if not cudnn.uses_batch_norm(x, weight, bias, mean, variance, training, epsilon, enabled).cudnn:
            return []
        low, high = cudnn.batch_norm_reserve_bytes(x, training, self._arch)
        least, most = cudnn.batch_norm_workspace_bytes(x, training, self._arch)
        return [Extra(high, low=low, owner=result[2]), Extra(most, low=least, workspace=True)]

    def _batch_norm_backward(self, args: Arguments, result: Any, in_backward: bool) -> list[Extra]:
        """Return the workspace where cuDNN's is taken: where the forward pass, in training, took it."""
        x, weight, mean, variance = args[1:5]
        training, epsilon = args[7:9]
        enabled = torch.backends.cudnn.enabled
        if not training or not cudnn.uses_batch_norm(x, weight, weight, mean, variance, True, epsilon, enabled).cudnn:
            return []
        least, most = cudnn.batch_norm_workspace_bytes(x, True, self._arch, backward=True)
        return [Extra(most, low=least, workspace=True)]

    def _recurrent(self, args: Arguments, result: Any, in_backward: bool) -> list[Extra]:
        """Return a reserve that lives as long as the empty one of a fake tensor, a workspace, once the states of
        dropout."""
        call = cudnn.RecurrentCall.of(args)
        (low, high), (least, most) = call.reserve(self._arch), call.workspace()
        found = [Extra(high, low=low, owner=result[3]), Extra(most, low=least, workspace=True)]
        if call.training and call.dropout and not self._dropout_states:
            self._dropout_states = True
            found.append(Extra(cudnn.dropout_state_bytes(self._arch), held=True, workspace=True))
        return found


def _recurrent_backward(args: Arguments, result: Any, in_backward: bool) -> list[Extra]:
    low, high = cudnn.RecurrentCall.of((*args[:6], *args[10:19])).workspace()
    return [Extra(high, low=low, workspace=True)]
