"""The allocations of CUDA ops beyond what fake CPU tensors show: workspaces, temporaries and reserves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memplan.cudnn.questions import Question
from memplan.cudnn.recurrent import RecurrentQuestion
from memplan.devices import Device, catalogue
from memplan.trace.semantics.cpu import sparse, sparse_results
from memplan.trace.semantics.cuda import cublas, cudnn, encoder_fast_path, kernels, results
from memplan.trace.semantics.cuda.arch import Arch, WatchedArch
from memplan.trace.semantics.cuda.cudnn_convolution import convolution_workspace, operand_copies
from memplan.trace.semantics.cuda.cudnn_questions import questions
from memplan.trace.semantics.kinds import Arguments, Keywords, Semantics, Temporary, WorkspaceQuery
from memplan.trace.semantics.layout import bytes_of, is_dense

_COPIES = frozenset({"aten._to_copy.default", "aten.copy_.default"})
_GROUPED = "aten._grouped_mm.default"
_OF_WEIGHTS = 3
"""Position of the weight gradients among the results of ``_cudnn_rnn_backward``."""
_INDEXED = frozenset(
    {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"}
)


def semantics(
    device: Device,
    stream: Callable[[], int],
    on_card: Callable[[torch.Tensor], bool],
    asks: bool = False,
    differing: set[str] | None = None,
) -> Semantics:
    """Return the semantics of a single recording for a card. They are stateful: cached workspaces are allocated once.

    Args:
        device: the card.
        stream: returns the number of the current CUDA stream.
        on_card: returns whether a tensor is on the card.
        asks: whether cuDNN is queried for the workspaces of convolutions after the recording.
        differing: a set that receives the names of the catalogue's cards on which an op allocates differently; None:
            other cards are not compared.
    """
    kernels = partial(_Kernels, stream=stream, on_card=on_card, asks=asks)
    of_card = kernels(Arch(device.architecture, device.multiprocessors))
    temporaries = of_card.temporaries if differing is None else _Compared(device, kernels, differing).temporaries
    return Semantics(
        temporaries, results.RESULTS, {**results.INSTEAD, **sparse_results.INSTEAD}, _assumed, results.ORDER
    )


def _assumed(name: str, args: Arguments, result: Any, replaced: bool) -> str | None:
    """Return the assumption to report for a sparse result: as on the CPU, with CUDA's workspaces unknown; or None.

    ``replaced``: whether `Semantics.instead` computed the result.
    """
    if name in sparse.FORMULAS and sparse.concerns(name, args, result):
        return "what kernels on sparse tensors take beside their results is not known on a card and NOT COUNTED"
    return sparse_results.assumed(name, args, result, replaced)


def is_own(name: str) -> bool:
    """Return whether CUDA runs an op by a library or kernel without a CPU counterpart (cuBLAS, cuDNN, attention)."""
    return name in cublas.USES or name.startswith(_CUDA_SPECIFIC)


_CUDA_SPECIFIC = (
    "aten.convolution",
    "aten.native_batch_norm",
    "aten._scaled_dot_product",
    "aten.bernoulli_",
    "aten.native_dropout",
    "aten.mkldnn_rnn_layer",
)


class _Compared:
    """Allocations of a card's kernels, compared with those of the other cards of the catalogue."""

    def __init__(self, card: Device, kernels: Callable[[Arch], _Kernels], differing: set[str]) -> None:
        """``kernels`` returns the allocations of kernels on a card with this architecture and number of
        multiprocessors; ``differing`` gets the names of cards on which an op allocates differently."""
        self._arch = WatchedArch(card.architecture, card.multiprocessors)
        """Architecture of the card; notes whether it was read."""
        self._kernels = kernels(self._arch)
        self._others = {
            other.name: kernels(Arch(other.architecture, other.multiprocessors))
            for other in catalogue()
            if (other.architecture, other.multiprocessors) != (card.architecture, card.multiprocessors)
        }
        """By name of each other card: what its kernels allocate. Cards that have differed are left out."""
        self._differing = differing

    def temporaries(
        self, name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
    ) -> list[Temporary]:
        """The allocations that the kernel of an op makes beyond its results; notes the cards with other allocations."""
        self._arch.reset()
        temporaries = self._kernels.temporaries(name, args, kwargs, result, in_backward)
        if self._arch.read:  # else the allocations do not depend on the card
            for card, other in list(self._others.items()):
                if other.temporaries(name, args, kwargs, result, in_backward) != temporaries:
                    del self._others[card]
                    self._differing.add(card)
        return temporaries


class _Kernels:
    """Allocations of a card's kernels during a recording, with the set of cached workspaces."""

    def __init__(
        self, arch: Arch, stream: Callable[[], int], on_card: Callable[[torch.Tensor], bool], asks: bool
    ) -> None:
        """``stream`` returns the number of the current CUDA stream, ``on_card`` whether a tensor is on the card."""
        self._arch = arch
        self._asks = asks
        """Whether cuDNN is asked for its workspaces."""
        self._benchmarked: set[tuple[Question, bool]] = set()
        """(convolution, whether in backward's thread) for which the thread has tried all plans."""
        self._stream = stream
        self._on_card = on_card
        self._has_dropout_states = False
        """Whether cuDNN's states of dropout are allocated."""
        self._called: set[tuple[cublas.Library, bool, int]] = set()
        """(library, whether in backward's thread, stream) of calls whose workspaces all exist."""
        self._cached_workspaces: set[tuple[cublas.Library, bool, int]] = set()
        """(owner, whether in backward's thread, stream) of the existing workspaces."""
        self._library_temporaries: dict[str, Callable[[Arguments, Any, bool], list[Temporary]]] = {
            "aten.convolution.default": partial(self._convolution_temporaries, backward=False),
            "aten.convolution_backward.default": partial(self._convolution_temporaries, backward=True),
            "aten.native_batch_norm.default": self._batch_norm,
            "aten.native_batch_norm_backward.default": self._batch_norm_backward,
            "aten._cudnn_rnn.default": self._recurrent,
            "aten._cudnn_rnn_backward.default": self._recurrent_backward,
        }
        """By op: returns what a library allocates for a call."""

    def temporaries(
        self, name: str, args: Arguments, kwargs: Keywords, result: Any, in_backward: bool
    ) -> list[Temporary]:
        """The allocations that the kernel of an op makes beyond its results."""
        temporaries: list[Temporary] = []
        if name.endswith(".out"):  # the kernel of the functional op, whose result is allocated before
            name = f"{name.removesuffix('.out')}.default"
        is_fast_path = name in encoder_fast_path.OPS
        if is_fast_path or self._is_product_loop(name, args):
            blas: cublas.Library | None = "cublas"
        else:
            blas = cublas.library(name, args, kwargs, result)
        if blas is not None:
            temporaries += self._cublas_workspaces(blas, in_backward)
        if is_fast_path:
            size = encoder_fast_path.temporaries(name, args, kwargs, result, self._arch.capability)
            temporaries.append(Temporary(size))
        library = self._library_temporaries.get(name)
        if library is not None:
            temporaries += [t for t in library(args, result, in_backward) if t.bytes or t.query]
        if name in _COPIES:
            temporaries += self._transfer_copy(args, result)
        if name in _INDEXED:  # TensorAdvancedIndexing.cpp: indices in the host's memory are copied first
            on_host = [i for i in args[1] if i is not None and i.numel() and not self._on_card(i)]
            temporaries += [Temporary(bytes_of(i), first=True) for i in on_host]
        formula = kernels.FORMULAS.get(name)
        has_query = any(t.query for t in temporaries)  # then `operand_copies` has counted the copies
        if formula is not None and not has_query:
            allocations = formula(args, kwargs, result, self._arch)
            temporaries += [a if isinstance(a, Temporary) else Temporary(a) for a in allocations if a]
        return temporaries

    def _is_product_loop(self, name: str, args: Arguments) -> bool:
        """Return whether ``_grouped_mm`` runs a cuBLAS product per group: except for bfloat16 on sm_90 and sm_100
        (cuda/GroupedBlas.cpp, _grouped_mm_cuda)."""
        return name == _GROUPED and not (self._arch.capability[0] in (9, 10) and args[0].dtype is torch.bfloat16)

    def _transfer_copy(self, args: Arguments, target: torch.Tensor) -> list[Temporary]:
        """The temporary of a copy to ``target`` between host and card that changes layout or dtype.

        Source: Copy.cu, copy_requires_temporaries. ``args``: of ``copy_`` (target, source) or ``_to_copy`` (source).
        """
        in_place = args[0] is target
        source = args[1] if in_place else args[0]
        # a new tensor is not in the ledger yet; this is only called for ops with a tensor on the card
        to_card, from_card = not in_place or self._on_card(target), self._on_card(source)
        same_layout = source.stride() == target.stride() and is_dense(target) and source.shape == target.shape
        if to_card == from_card or (same_layout and source.dtype is target.dtype):
            return []
        on_card = target if to_card else source
        return [] if on_card.is_contiguous() else [Temporary(bytes_of(on_card), first=True)]

    def _cublas_workspaces(self, library: cublas.Library, in_backward: bool) -> Iterator[Temporary]:
        """Yield the workspaces that a call allocates: with caching, only the first call per thread and stream.

        The backward pass runs in its own thread, and so with its own handle.
        """
        # read when a real handle would be created: importing a library may have set it (MONAI sets :4096:8)
        cached = cublas.caches_workspaces(os.environ)
        call = library, in_backward, self._stream()
        if cached and call in self._called:
            return
        self._called.add(call)
        for owner, size in cublas.workspaces(library, self._arch.capability, os.environ).items():
            key = owner, in_backward, self._stream()
            if not cached or key not in self._cached_workspaces:
                self._cached_workspaces.add(key)
                yield Temporary(size, permanent=cached, workspace=True)

    def _convolution_temporaries(
        self, args: Arguments, result: Any, in_backward: bool, *, backward: bool
    ) -> list[Temporary]:
        """Return the allocations of a convolution: its workspace, as an interval, and if cuDNN is queried for it the
        operands' copies.

        ``in_backward``: whether autograd's thread runs the op; ``backward``: whether the op is the derivative.
        """
        benchmark = torch.backends.cudnn.benchmark
        workspace = convolution_workspace(args, result, self._arch, benchmark=benchmark, backward=backward)
        low = workspace.low if workspace.low != workspace.high else None
        queries = questions(args, result, backward=backward) if workspace.cudnn and self._asks else []
        if queries:
            return operand_copies(args, self._arch, backward=backward) + [
                Temporary(
                    workspace.high, low=low, workspace=True, query=self._query(question, in_backward), after=position
                )
                for position, question in queries
            ]
        temporary = Temporary(workspace.high, low=low, workspace=True)
        return [*(self._cublas_workspaces("cublas", in_backward) if workspace.product else ()), temporary]

    def _query(self, question: Question, in_backward: bool) -> WorkspaceQuery:
        """Return the query to cuDNN for a workspace. With ``cudnn.benchmark``, a thread tries all plans once and caches
        the fastest (native/cudnn/Conv_v8.cpp)."""
        if not torch.backends.cudnn.benchmark:
            return WorkspaceQuery(question, "first")
        benchmarked = (question, in_backward) in self._benchmarked
        self._benchmarked.add((question, in_backward))
        return WorkspaceQuery(question, "any" if benchmarked else "largest")

    def _batch_norm(self, args: Arguments, result: Any, in_backward: bool) -> list[Temporary]:
        """Return the allocations of cuDNN's batch norm: a reserve that lives as long as the statistics, and a
        workspace.

        The native batch norm has none here.
        """
        x, weight, bias, mean, variance, training, _, epsilon = args
        if not cudnn.uses_batch_norm(x, weight, bias, mean, variance, training, epsilon).cudnn:
            return []
        low, high = cudnn.batch_norm_reserve_bytes(x, training, self._arch)
        workspace_low, workspace_high = cudnn.batch_norm_workspace_bytes(x, training, self._arch)
        return [Temporary(high, low=low, owner=result[2]), Temporary(workspace_high, low=workspace_low, workspace=True)]

    def _batch_norm_backward(self, args: Arguments, result: Any, in_backward: bool) -> list[Temporary]:
        """Return the workspace of cuDNN's batch norm, which runs if the training forward used cuDNN."""
        x, weight, mean, variance = args[1:5]
        training, epsilon = args[7:9]
        # the derivative gets no bias: the layer has one if it has a weight
        if (
            not training
            or not cudnn.uses_batch_norm(
                x, weight, bias=weight, running_mean=mean, running_var=variance, training=True, epsilon=epsilon
            ).cudnn
        ):
            return []
        workspace_low, workspace_high = cudnn.batch_norm_workspace_bytes(
            x, training=True, arch=self._arch, backward=True
        )
        return [Temporary(workspace_high, low=workspace_low, workspace=True)]

    def _recurrent(self, args: Arguments, result: Any, in_backward: bool) -> list[Temporary]:
        """Return the allocations of cuDNN's recurrent op, of whose results the fourth is its (empty) fake reserve.

        At first use the dropout states; a copy of the input; a workspace; and a reserve, freed with the fake reserve.
        Source: cudnn/RNN.cpp, _cudnn_impl and _cudnn_rnn.
        """
        question = cudnn.recurrent_question(args, self._arch)
        batch_first, batch_sizes = args[10], args[14]
        copy = cudnn.input_copy(args, batch_first=batch_first and not batch_sizes)
        low, high = cudnn.reserve_of(question)
        states = 0
        if question.training and question.dropout and not self._has_dropout_states:
            self._has_dropout_states = True
            states = cudnn.dropout_state_bytes(self._arch)
        return [
            Temporary(states, permanent=True, first=True, workspace=True),
            Temporary(copy, first=True),
            self._recurrent_workspace(question),
            Temporary(high, low=low if low != high else None, owner=result[3]),
        ]

    def _recurrent_backward(self, args: Arguments, result: Any, in_backward: bool) -> list[Temporary]:
        """Return the allocations of the derivative of cuDNN's recurrent op: first the gradients of input and states,
        then that of the weights, each with its workspace. Both read a copy of the input.

        Source: cudnn/RNN.cpp, _cudnn_rnn_backward.
        """
        forward_args = (*args[:6], *args[10:19])
        question = cudnn.recurrent_question(forward_args, self._arch, backward=True)
        batch_first, batch_sizes, needs_gradient = args[14], args[18], args[21]
        time_first_copies = batch_first and not batch_sizes
        copy = cudnn.input_copy(args, batch_first=time_first_copies)
        zeros, gradient = cudnn.gradient_copies(args, batch_first=time_first_copies)
        workspace = self._recurrent_workspace(question)
        return [
            *(Temporary(size, first=True) for size in (*zeros, copy)),
            Temporary(gradient, first=True, until=_OF_WEIGHTS),
            replace(workspace, after=_OF_WEIGHTS - 1),
            *([workspace] if needs_gradient[_OF_WEIGHTS] else []),
        ]

    def _recurrent_workspace(self, question: RecurrentQuestion) -> Temporary:
        """Return the workspace of a recurrent network as an interval, with a query for it if cuDNN is asked."""
        low, high = cudnn.workspace_of(question)
        return Temporary(high, low=low, workspace=True, query=WorkspaceQuery(question, "first") if self._asks else None)
