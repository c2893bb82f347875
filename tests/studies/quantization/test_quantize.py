"""Quantized inference against what else counts bytes: the profiler's own sums, the model's file, arithmetic."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import slow
from models.networks import SmallGPT
from torch import nn

import memplan
from memplan.errors import InputError, StepError, TargetError, UsageError
from memplan.studies.comparisons.comparison import CAST_COPIES
from memplan.studies.quantization import schemes

pytest.importorskip("torchao")
SIZE = "16x256"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 20))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def allocated_by(make: Callable[[], Any]) -> int:
    """Net bytes that the process's allocator has given for what is made, as torch's profiler adds them up."""
    gc.collect()  # torchao ties each quantized layer into a cycle: one of before must not be freed meanwhile
    gc.disable()
    try:
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            made = make()
    finally:
        gc.enable()
    events: Any = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    total = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del made
    return total


def quantized_copy(model: nn.Module, weights: str, activations: str | None = None) -> nn.Module:
    made = copy.deepcopy(model)
    schemes.quantize_weights(made, schemes.scheme_of(weights, activations))
    return made


@pytest.mark.parametrize(("weights", "activations"), [("int8", None), *slow(("int8", "int8"), ("int4", None))])
def test_weights_saved_are_what_the_allocator_reports(weights: str, activations: str | None) -> None:
    model = net()
    quantized_copy(model, weights, activations)  # what torchao keeps from its first use on is not the model's
    found = memplan.quantize(model, SIZE if weights == "int8" else "1x256", weights=weights, activations=activations)
    saved = allocated_by(lambda: copy.deepcopy(model)) - allocated_by(
        lambda: quantized_copy(model, weights, activations)
    )
    assert found.weights_saved == pytest.approx(saved, rel=0.02)
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(model.state_dict(), files[0])
    torch.save(quantized_copy(model, weights, activations).state_dict(), files[1])
    assert found.weights_saved == pytest.approx(files[0].tell() - files[1].tell(), rel=0.02)
    assert found.weights_saved == sum(layer.before - layer.after for layer in found.layers)


def test_int8_by_hand() -> None:
    found = memplan.quantize(net(), SIZE)
    assert found.after is not None
    # a byte a number, and of each output a scale in float32 and a zero in a byte; biases as they were
    for layer, (outputs, inputs) in zip(found.layers, [(512, 256), (256, 512), (20, 256)], strict=True):
        assert (layer.before, layer.after, layer.why) == (4 * outputs * inputs, outputs * (inputs + 5), None)
    assert found.after.weight_bytes == sum(layer.after for layer in found.layers) + 4 * (512 + 256 + 20)
    # weights alone are multiplied in float32, one layer at a time
    assert found.after.cast_bytes == 4 * 512 * 256
    assert found.after.by_cause[CAST_COPIES] == 4 * 512 * 256
    both = memplan.quantize(net(), SIZE, activations="int8")
    assert both.after is not None
    assert both.after.cast_bytes == 0
    assert max(both.after.peak, found.after.peak) < found.before.peak  # whose scratch is larger depends on the CPU


def test_int4_is_packed_as_predicted() -> None:
    model = net()
    scheme = schemes.scheme_of("int4", None)
    found = memplan.quantize(model, "1x256", weights="int4")
    for layer, name in zip(found.layers, ("0", "2"), strict=False):
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        assert layer.after == schemes.packed_bytes(module, scheme) == module.weight.numel() // 2 * (1 + 2 * 8 / 128)
    assert found.layers[2].why == "its 20 outputs are no multiple of 16, as the kernel wants them"
    assert found.layers[2].before == found.layers[2].after


@pytest.mark.parametrize("activations", [None, "int8"])
def test_the_error_is_that_of_the_outputs(activations: str | None) -> None:
    model, data = net(), torch.randn(16, 256)
    found = memplan.quantize(model, data, activations=activations)
    with torch.no_grad():
        one, other = model(data).double(), quantized_copy(model, "int8", activations)(data).double()
    assert found.error is not None
    assert found.error.relative == pytest.approx(float((other - one).norm() / one.norm()), rel=1e-9)
    assert found.error.largest == pytest.approx(float((other - one).abs().max()), rel=1e-9)
    assert 0 < (found.error.relative or 0) < 0.05


def test_peaks_are_those_of_a_step_alone() -> None:
    found = memplan.quantize(net(), SIZE)
    explained = memplan.explain(net, SIZE, train=False, device="cpu").timeline
    assert found.before.peak == explained.steps[0].peak_allocated
    assert found.after is not None
    assert sum(found.after.by_cause.values()) == found.after.peak
    assert found.quantizing_peak is not None
    assert found.quantizing_peak > found.before.peak  # both forms of a weight are there at once


def test_what_lives_at_once_without_grad_and_with_it() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())])
    found = memplan.quantize(deep, "8x64")
    size = 4 * 8 * 64
    assert found.before.activation_bytes == 2 * size  # what a layer reads and what it makes
    assert found.with_grad.activation_bytes == 7 * size  # what every tanh gave, and the last linear's result


def test_layers_that_stay_are_named() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv1d(3, 16, 3), nn.MultiheadAttention(16, 2, batch_first=True)
            self.out = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x).transpose(1, 2)
            return self.out(self.attention(y, y, y, need_weights=False)[0])

    found = memplan.quantize(Mixed, "2x3x18")
    whys = {layer.name: layer.why for layer in found.layers}
    assert whys == {
        "conv": "torchao quantizes nn.Linear, not Conv1d",
        "attention": "torchao quantizes nn.Linear, not MultiheadAttention",
        "attention.out_proj": "the attention around it reads its weight itself",
        "out": None,
    }


def test_a_tied_weight_is_there_in_both_forms() -> None:
    found = memplan.quantize(Tied, memplan.spec("2x5:int64<64"))
    assert found.after is not None
    assert found.before.weight_bytes == 4 * 64 * 128
    assert found.after.weight_bytes == 4 * 64 * 128 + 64 * (128 + 5)
    assert found.weights_saved == sum(layer.before - layer.after for layer in found.layers) < 0
    assert [(layer.before, layer.after) for layer in found.layers] == [(4 * 64 * 128,) * 2, (0, 64 * (128 + 5))]
    assert found.layers[0].why is not None
    assert "head shares its weight and got one of its own" in found.layers[0].why


def test_what_has_no_kernel_here_is_predicted_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes.dispatch, "has_cpu_kernel", lambda name: False)
    found = memplan.quantize(net(), "1x256", weights="int4", activations="int8")
    assert (found.after, found.error, found.quantizing_peak) == (None, None, None)
    assert found.weights_saved == sum(4 * n - n // 2 - n // 128 * 5 for n in (512 * 256, 256 * 512))
    assert "was not run: its kernel da8w4_linear_cpu is not in this build" in " ".join(str(found).split())


def test_kernels_are_looked_up() -> None:
    assert schemes.dispatch.has_cpu_kernel("aten::mm")
    assert not schemes.dispatch.has_cpu_kernel("torchao::no_such_op")


def test_a_language_model_and_a_lower_precision() -> None:
    found = memplan.quantize(lambda: SmallGPT(width=64), memplan.spec("2x12:int64<40"))
    assert sum(layer.why is None for layer in found.layers) == 13
    half = memplan.quantize(net, memplan.spec(SIZE, dtype="bfloat16"), dtype=torch.bfloat16)
    assert half.before.weight_bytes == 2 * sum(p.numel() for p in net().parameters())
    assert half.layers[0].after == 512 * (256 + 5)


def test_the_users_model_stays_as_it_is() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memplan.quantize(model, SIZE)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[0].weight) is nn.Parameter


def build() -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("what", "options", "kind", "said"),
    [
        (net, {"weights": "int2"}, InputError, "weights='int2'. Expected weights in int8 or int4"),
        (net, {"weights": None, "activations": "int8"}, InputError, "activations are quantized only beside them"),
        (net, {"activations": "int4"}, InputError, "activations='int4'"),
        (3, {}, TargetError, "int 3"),
        (build, {}, TargetError, "a build that returns a step"),
        (lambda: nn.Conv2d(3, 4, 3), {}, InputError, "nothing in Conv2d can be quantized"),
        (lambda: nn.Linear(3, 4), {}, StepError, "as it is: step 1 raised"),
    ],
)
def test_mistakes(what: Any, options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        memplan.quantize(what, SIZE, **options)
    assert said in str(caught.value)


def test_without_torchao_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UsageError, match=r"torchao cannot be imported.*pip install 'memplan\[quantize\]'"):
        memplan.quantize(net, SIZE)
