"""Layers made anew are those that the user would have made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import memplan
from memplan.errors import InputError
from memplan.studies.axes.changed_layers import LayerChange, change_layers, rebuild_layer

PAIRS: list[tuple[Callable[[], nn.Module], str, Any, Callable[[], nn.Module]]] = [
    (lambda: nn.Conv2d(3, 8, 3, padding=1, bias=False), "kernel_size", 5,
     lambda: nn.Conv2d(3, 8, 5, padding=1, bias=False)),
    (lambda: nn.Conv3d(4, 8, 3, groups=2, padding="same"), "groups", 4,
     lambda: nn.Conv3d(4, 8, 3, groups=4, padding="same")),
    (lambda: nn.ConvTranspose1d(4, 8, 2, stride=2), "out_channels", 6, lambda: nn.ConvTranspose1d(4, 6, 2, stride=2)),
    (lambda: nn.Linear(4, 8), "bias", False, lambda: nn.Linear(4, 8, bias=False)),
    (lambda: nn.BatchNorm2d(4), "affine", False, lambda: nn.BatchNorm2d(4, affine=False)),
    (lambda: nn.LayerNorm([4, 5]), "normalized_shape", (5,), lambda: nn.LayerNorm([5])),
    (lambda: nn.MaxPool2d(2), "kernel_size", 3, lambda: nn.MaxPool2d(3, stride=2)),
    (lambda: nn.LSTM(4, 8, num_layers=2, batch_first=True), "hidden_size", 6,
     lambda: nn.LSTM(4, 6, num_layers=2, batch_first=True)),
    (lambda: nn.Embedding(9, 4, padding_idx=1), "embedding_dim", 5, lambda: nn.Embedding(9, 5, padding_idx=1)),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), "num_heads", 4,
     lambda: nn.MultiheadAttention(8, 4, batch_first=True)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "attribute", "value", "wanted"), PAIRS, ids=lambda one: str(one)[:20])
def test_a_layer_is_made_as_its_constructor_would(
    make: Callable[[], nn.Module], attribute: str, value: Any, wanted: Callable[[], nn.Module]
) -> None:
    made, right = rebuild_layer(make(), attribute, value), wanted()
    assert repr(made) == repr(right)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in right.named_parameters()}


def stack(kernel: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, kernel), nn.ReLU(), nn.Conv2d(8, 8, kernel), nn.Conv2d(8, 4, 1))


def test_the_step_of_a_changed_model_is_that_of_the_model_so_made() -> None:
    changes = [LayerChange("0", "kernel_size", 5), LayerChange("2", "kernel_size", 5)]
    changed = memplan.explain(lambda: change_layers(stack(3), changes), "2x3x32x32")
    made = memplan.explain(lambda: stack(5), "2x3x32x32")
    assert changed.by_cause == made.by_cause
    assert changed.timeline.peak_allocated == made.timeline.peak_allocated


def test_what_a_layer_was_stays() -> None:
    layer = nn.Conv2d(3, 8, 3, dtype=torch.bfloat16).eval()
    layer.weight.requires_grad_(False)
    made = rebuild_layer(layer, "kernel_size", 1)
    assert [p.dtype for p in made.parameters()] == [torch.bfloat16] * 2
    assert [p.requires_grad for p in made.parameters()] == [False, True]
    assert not made.training


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.Conv2d(4, 4, 3)
    model = change_layers(nn.Sequential(shared, nn.Sequential(shared), nn.ReLU()), [LayerChange("*", "kernel_size", 5)])
    assert model.get_submodule("0") is model.get_submodule("1.0")
    assert model.get_submodule("0").kernel_size == (5, 5)


def test_a_model_that_is_the_layer_is_replaced() -> None:
    assert repr(change_layers(nn.Linear(2, 3), [LayerChange("", "out_features", 5)])) == repr(nn.Linear(2, 5))


class Scaled(nn.Module):
    """Keeps no argument of its constructor, but an attribute that its forward pass reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = 1.0


def hooked(kernel: int) -> nn.Module:
    """Hooks that take memory: what is returned and what a gradient passes through is copied in a larger dtype."""
    model = stack(kernel)
    for name in ("0", "2"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda module, args, output: output.double().exp().float())
        layer.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    # not on the first: torch warns where a layer's input has no gradient
    model.get_submodule("2").register_full_backward_hook(lambda module, inputs, outputs: tuple(2 * i for i in inputs))
    return model


def test_hooks_stay_on_a_layer_that_is_made_anew() -> None:
    def changed() -> nn.Module:
        return change_layers(hooked(3), [LayerChange("0", "kernel_size", 5), LayerChange("2", "kernel_size", 5)])

    makes = (changed, lambda: hooked(5), lambda: stack(5))
    found, right, without = (memplan.explain(make, "2x3x32x32") for make in makes)
    assert found.by_cause == right.by_cause
    assert found.timeline.peak_allocated == right.timeline.peak_allocated > without.timeline.peak_allocated
    torch.manual_seed(0)
    one, other, x = changed(), hooked(5), torch.randn(1, 3, 16, 16)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(x), other(x), rtol=0, atol=0)


def test_hooks_of_parts_stay_and_those_of_the_constructor_are_not_doubled() -> None:
    calls: list[str] = []

    class Counted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.inner = nn.Linear(2, width)
            self.register_forward_hook(lambda *_: calls.append("own"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Counted(2)
    model.inner.register_forward_hook(lambda *_: calls.append("inner"))
    made = rebuild_layer(model, "width", 3)
    made(torch.zeros(1, 2))
    assert calls == ["inner", "own"]
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="cannot be made anew: it has hooks, and made anew it has others"):
        rebuild_layer(model, "width", 3)


def test_a_layer_with_another_forward_is_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = lambda input: input
    with pytest.raises(InputError, match="cannot be made anew: its forward was replaced"):
        rebuild_layer(layer, "out_features", 3)


def test_a_pruned_layer_is_refused() -> None:
    layer = prune.l1_unstructured(nn.Linear(2, 2, bias=False), "weight", amount=0.5)
    with pytest.raises(InputError, match="made again with the same arguments, its parameters differ"):
        rebuild_layer(layer, "out_features", 3)


def test_an_attribute_that_is_no_argument_is_set() -> None:
    model = change_layers(nn.Sequential(Scaled(2)), [LayerChange("0", "scale", 3.0)])
    assert model.get_submodule("0").scale == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (LayerChange("0", "width", 3), "does not keep its argument 'width'"),
        (LayerChange("1", "groups", 3), "(Conv2d) cannot be made so: ValueError: in_channels must be"),
        (LayerChange("1", "kernel", 3), "the layers that '1' names have no 'kernel' (Conv2d)"),
        (LayerChange("", "kernel", 3), "the model itself has no 'kernel' (Sequential)"),
        (LayerChange("0.iner", "bias", False), "Sequential has no layer '0.iner'. Expected a name or a pattern"),
    ],
)
def test_what_cannot_be_changed_is_refused_in_one_line(change: LayerChange, words: str) -> None:
    with pytest.raises(InputError) as error:
        change_layers(nn.Sequential(Scaled(2), nn.Conv2d(2, 2, 1)), [change])
    assert words in str(error.value)
    assert "\n" not in str(error.value)
