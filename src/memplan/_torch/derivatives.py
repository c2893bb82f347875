"""Convolutions' derivatives in a traced function: two calls that compute a part each, as one.

Seen in torch 2.11, 2.13 and 2.15: the arguments and results of ``aten::convolution_backward``, and that what
``make_fx`` traces takes results apart by ``operator.getitem``.
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
"""Position of the argument that says which results are wanted: the input's, the weight's, the bias's."""


def join(of: Traced, pairs: Mapping[int, int]) -> None:
    """Join pairs of calls of convolution_backward, for the weight's and for the input's gradient, into a single call
    at the place of the first. Pairs that were decomposed into other ops stay.

    Args:
        of: a traced function; its graph is changed.
        pairs: mark (see `mark_of`) of the call for the weight's gradient -> mark of the call for the input's.
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
    """Let the first call compute the results of both, and its ``getitem`` nodes replace those of the second."""
    first_results, second_results = first.meta["val"], second.meta["val"]
    first.update_arg(_MASK, [a or b for a, b in zip(first.args[_MASK], second.args[_MASK], strict=True)])  # pyright: ignore[reportArgumentType]
    first.meta["val"] = tuple(b if a is None else a for a, b in zip(first_results, second_results, strict=True))
    for user in list(second.users):
        assert user.target is operator.getitem, "results are taken apart"
        with first.graph.inserting_after(first):
            twin = first.graph.call_function(operator.getitem, (first, user.args[1]))
        twin.meta = dict(user.meta)
        user.replace_all_uses_with(twin)
        first.graph.erase_node(user)
    first.graph.erase_node(second)
