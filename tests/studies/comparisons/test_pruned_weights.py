"""Zeros among weights, against counting them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from memplan.studies.comparisons.pruned_weights import LEAST, zeros_of


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([nn.Conv2d, nn.ConvTranspose2d]), st.integers(2, 6), st.integers(2, 6), st.data())
def test_counted_one_by_one(kind: type, inputs: int, outputs: int, data: st.DataObject) -> None:
    layer = kind(inputs, outputs, 2)
    across = 1 if kind is nn.ConvTranspose2d else 0
    gone = data.draw(st.sets(st.integers(0, outputs - 1), max_size=outputs - 1))
    with torch.no_grad():
        for channel in gone:
            layer.weight.select(across, channel).zero_()
    found = zeros_of(nn.Sequential(layer))
    zeros = sum(1 for value in layer.weight.flatten().tolist() if value == 0)
    if zeros < LEAST * layer.weight.numel():
        assert found == ()
        return
    (row,) = found
    assert (row.zeros, row.empty_channels, row.channels) == (zeros, len(gone), outputs)
    assert row.fewer_channels == len(gone)  # as many weights as there are zeros
    assert row.bytes_of_fewer == zeros * 4


def test_a_mask_counts_and_so_do_its_bytes() -> None:
    layer = nn.Linear(10, 8)
    prune.random_unstructured(layer, "weight", amount=20)
    (row,) = zeros_of(layer)
    assert (row.layer, row.name, row.zeros, row.bytes, row.mask_bytes) == ("Linear", "weight", 20, 320, 320)
    assert row.fewer_channels == 2
    assert row.bytes_of_fewer == 2 * 10 * 4


def test_what_is_no_pruning() -> None:
    untouched, unused = nn.Linear(10, 8), nn.Conv2d(3, 3, 1)
    nn.init.zeros_(unused.weight)  # never trained
    padded = nn.Embedding(100, 4, padding_idx=0)
    assert zeros_of(nn.Sequential(untouched, unused, padded, nn.LayerNorm(4))) == ()
