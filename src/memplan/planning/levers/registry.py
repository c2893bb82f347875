"""The list of all levers, and the encodings that they offer for the values of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from memplan.planning.graph.joint_graph import JointGraph
from memplan.planning.graph.precision import Precision
from memplan.planning.levers.chunk_convolutions import ChunkConvolutions
from memplan.planning.levers.eight_bit_moments import EightBitMoments
from memplan.planning.levers.encode import Encode
from memplan.planning.levers.in_place import InPlace
from memplan.planning.levers.kernel import Kernel
from memplan.planning.levers.lever import Lever, Situation
from memplan.planning.levers.lower_precision import LowerPrecision
from memplan.planning.levers.offload import Offload
from memplan.planning.levers.order import Order
from memplan.planning.levers.packed_masters import PackedMasters
from memplan.planning.levers.recompute import Recompute
from memplan.planning.levers.release_gradients import ReleaseGradients
from memplan.planning.levers.tile import Tile
from memplan.planning.levers.update_early import UpdateEarly

RECOMPUTE, LOWER_PRECISION, TILE, KERNEL = Recompute(), LowerPrecision(), Tile(), Kernel()
UPDATE_EARLY, RELEASE_GRADIENTS = UpdateEarly(), ReleaseGradients()

LEVERS: list[Lever] = [
    RECOMPUTE, Encode(), Offload(), LOWER_PRECISION, ChunkConvolutions(), TILE, KERNEL, InPlace(), Order(),
    UPDATE_EARLY, RELEASE_GRADIENTS, PackedMasters(), EightBitMoments(),
]  # fmt: skip
"""All levers. If several encodings of a value are chosen, the first lever's is decoded; host copies come last."""


def find(name: str) -> Lever:
    """Return the lever of this name. Raises KeyError if no such lever is registered."""
    levers = {lever.name: lever for lever in LEVERS}
    if name not in levers:
        raise KeyError(f"{name!r} is no lever: there are {', '.join(levers)}")
    return levers[name]


@contextmanager
def registered(lever: Lever) -> Iterator[Lever]:
    """Add a lever to the list within this context."""
    assert all(other.name != lever.name for other in LEVERS), "a lever's name is its own"
    before = list(LEVERS)
    LEVERS.append(lever)
    try:
        yield lever
    finally:
        LEVERS[:] = before


def apply_rewrites(graph: JointGraph, precision: Precision) -> JointGraph:
    """Return a captured graph after the rewrites of all levers, in the order of the registry."""
    for lever in LEVERS:
        graph = lever.rewrite(graph, precision)
    return graph


def with_encodings(graph: JointGraph, situation: Situation) -> JointGraph:
    """Return the graph with the encodings that all levers offer in a situation; those that it has are discarded."""
    values = tuple(value for value in graph.values if value.kind not in ("encoded", "host"))
    assert all(value.id == index for index, value in enumerate(values)), "encoded values have the last ids"
    return with_encodings_of(replace(graph, values=values, forms=()), situation, LEVERS)


def with_encodings_of(graph: JointGraph, situation: Situation, levers: Iterable[Lever]) -> JointGraph:
    """Return the graph with the encodings of these levers, too. Encoded values get the next free ids."""
    values, forms = list(graph.values), list(graph.forms)
    overwritten = {graph.base(target) for target, _ in graph.mutations}
    for lever in levers:
        for form, encoded in lever.forms(graph, situation):
            if not overwritten.isdisjoint(form.fetch_operands):
                continue  # the forward pass overwrites what decoding would read
            encoded_id = len(values)
            assert not form.fetch_operands or graph.maker[form.value].makes == (form.value,), "see `fetch_operands`"
            assert not (form.fetch_operands and form.is_copied), "a copy reads nothing else"
            values.append(replace(encoded, id=encoded_id, base=encoded_id))
            forms.append(replace(form, encoded=encoded_id))
    return replace(graph, values=tuple(values), forms=tuple(forms))
