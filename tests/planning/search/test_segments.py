"""Where the forward pass is cut, and what the variants of a segment come to."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from planning.graphs import residual, transformer, unet

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.resident import Surroundings
from memplan.planning.search.batch_evaluator import Evaluator
from memplan.planning.search.flat_graph import FlatGraph
from memplan.planning.search.segments import MOST, Variants, repeated, segments


def flat(graph: JointGraph) -> FlatGraph:
    return FlatGraph(graph, Surroundings())


def test_segments_cover_the_forward_pass() -> None:
    for graph in (residual(), transformer(48), unet()):
        parts = segments(flat(graph), 5000)
        assert parts[0].start == 0
        assert parts[-1].stop == len(graph.forward_ops)
        assert all(one.stop == other.start for one, other in pairwise(parts))
        assert 3 < len(parts) <= MOST


def test_a_network_is_cut_between_its_blocks() -> None:
    """One value crosses there: the residual stream."""
    one = flat(transformer(8))
    for part in segments(one, 5000)[1:-1]:
        crossing = [
            row
            for row in range(len(one.values))
            if one.bytes[row] > 5000 and one.maker[row] < part.stop <= one.used_last[row]
        ]
        assert len(crossing) == 1


def test_blocks_that_repeat() -> None:
    graph = transformer(8)
    one = flat(graph)
    groups = repeated(one, segments(one, 5000))
    assert groups
    for group in groups:
        assert len({graph.ops[graph.values[one.values[row]].op or 0].target for row in group}) == 1
        assert len({int(one.bytes[row]) for row in group}) == 1
    assert max(len(group) for group in groups) >= 7


def test_what_variants_save_is_what_the_boundary_loses() -> None:
    evaluator = Evaluator(transformer(4))
    variants = Variants(evaluator, small=5000)
    kept = evaluator.profiles(np.zeros((evaluator.rows, 1), dtype=bool))[0]
    for variant in variants.all():
        column = np.zeros((evaluator.rows, 1), dtype=bool)
        column[variant.rows, 0] = variant.bits
        alone = evaluator.profiles(column)[0]
        before = int(variants.saved[variant.first : variant.stop].sum())
        assert before - variant.saved == kept.boundary - alone.boundary
        assert variant.seconds == evaluator.evaluate(column).seconds[0]
