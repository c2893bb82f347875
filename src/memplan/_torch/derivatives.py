"""Merge calls of convolution_backward that compute one gradient each into a single call, in a traced function.

Seen in torch 2.11, 2.13 and 2.15: the arguments and results of ``aten::convolution_backward``, and ``make_fx``, which
selects single results by ``operator.getitem``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx

from memplan._torch.inductor import Traced
from memplan._torch.scheduled import mark_of

_DERIVATIVE = torch.ops.aten.convolution_backward.default
_MASK = 10
"""Position of ``output_mask``: whether to compute the gradients of input, weight and bias."""


def join(of: Traced, pairs: Mapping[int, int]) -> None:
    """Merge pairs of calls of convolution_backward, for the weight's and for the input's gradient, into a single call
    at the position of the first. Pairs that were decomposed into other ops stay.

    Args:
        of: a traced function; its graph is changed.
        pairs: number by which `memplan._torch.inductor.mark` marked the call for the weight's gradient -> that of the
            call for the input's.
    """
    by_mark: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in of.graph.graph.nodes:
        if node.target is _DERIVATIVE:
            by_mark[mark_of(node)].append(node)
    for marks in pairs.items():
        firsts, seconds = (by_mark[mark] for mark in marks)
        if len(firsts) == len(seconds) == 1:
            _join(firsts[0], seconds[0])
    of.graph.graph.eliminate_dead_code()
    of.graph.recompile()


def _join(first: fx.Node, second: fx.Node) -> None:
    """Let the first call of convolution_backward compute the results of both, and replace the ``getitem`` nodes of the
    second by new nodes of the first."""
    first_results, second_results = first.meta["val"], second.meta["val"]
    first.update_arg(_MASK, [a or b for a, b in zip(first.args[_MASK], second.args[_MASK], strict=True)])  # pyright: ignore[reportArgumentType]
    first.meta["val"] = tuple(b if a is None else a for a, b in zip(first_results, second_results, strict=True))
    for getitem in list(second.users):
        assert getitem.target is operator.getitem, "make_fx selects results by getitem"
        with first.graph.inserting_after(first):
            replacement = first.graph.call_function(operator.getitem, (first, getitem.args[1]))
        replacement.meta = dict(getitem.meta)
        getitem.replace_all_uses_with(replacement)
        first.graph.erase_node(getitem)
    first.graph.erase_node(second)
