"""Explanations: sums are exact, what is saved is what autograd saved, numbers scale as measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow, thinned
from models.steps import STEPS, mlp, plain
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan
from memplan._bytes import format_bytes
from memplan.errors import InputError, StepError, TargetError
from memplan.trace.step import StepOptions, build_of


def small_resnet() -> nn.Module:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)

    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Block(16), nn.MaxPool2d(2), Block(16), nn.Flatten(),
                         nn.Linear(16 * 16 * 16, 10))  # fmt: skip


MODELS: dict[str, tuple[Any, str]] = {
    "resnet": (small_resnet, "8x3x32x32"),
    "mlp": (lambda: mlp(128), "64x128"),
    "norms": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Dropout(0.3),
                              nn.LayerNorm(8 * 14 * 14), nn.GELU(), nn.Linear(8 * 14 * 14, 5), nn.Softmax(-1)),
        "8x4x16x16",
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), "4x32x64"),
}  # fmt: skip


def saved_by_autograd(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of distinct storages that autograd's own hooks see packed, without parameters, buffers and the input."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(x)
        output = output.sum()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", thinned(MODELS, 2))
def test_saved_is_what_autograd_packs(name: str) -> None:
    make, shape = MODELS[name]
    explanation = memplan.explain(make, shape)
    model = make()
    assert explanation.saved_bytes == saved_by_autograd(model, memplan.spec(shape).make())


@pytest.mark.parametrize(
    "name", ["norms", "autocast", *slow("resnet", "mlp", "attention", "checkpoint_reentrant", "gru")]
)
def test_sums_are_exact(name: str) -> None:
    explanation = memplan.explain(*MODELS[name]) if name in MODELS else memplan.explain(STEPS[name])
    assert sum(explanation.by_cause.values()) == explanation.timeline.peak_allocated
    assert sum(explanation.by_cause_reserved.values()) == explanation.timeline.peak_reserved
    assert sum(row.saved_bytes for row in explanation.layers) == explanation.saved_bytes > 0
    assert sum(row.bytes for row in explanation.saved if row.counted) == explanation.saved_bytes
    assert all(explanation.by_cause_most[cause] >= explanation.by_cause[cause] for cause in explanation.by_cause_most)


def test_weights_and_gradients_are_those_of_the_model() -> None:
    explanation = memplan.explain(small_resnet, "8x3x32x32", optimizer=torch.optim.AdamW)
    size = sum(p.numel() * 4 for p in small_resnet().parameters())
    assert sum(row.weight_bytes for row in explanation.layers) == size == explanation.by_cause["weight"]
    assert sum(row.gradient_bytes for row in explanation.layers) == size
    states = sum(2 * p.numel() * 4 + 4 for p in small_resnet().parameters())
    assert explanation.by_cause_most["optimizer_state"] == states


def test_reasons_name_formula_gradient_and_sharer() -> None:
    rows = {row.name: row for row in memplan.explain(small_resnet, "8x3x32x32").layers}
    assert rows["2.conv2"].why == (
        "conv2d saves its input for the weight's gradient (convolution_backward); shared with 2.relu's result",
    )
    assert rows["2.conv2"].needed_for == ("weight_gradient",)
    assert rows["2.conv2"].saved_bytes == 0 < rows["2.conv2"].kept_bytes == 8 * 16 * 32 * 32 * 4
    assert rows["2.relu"].needed_for == ("input_gradient",)
    assert any("its indices for the input's gradient (max_pool2d_with_indices_backward)" in w for w in rows["3"].why)
    assert rows["2.bn1"].needed_for == ("weight_gradient", "input_gradient")
    assert "test_explain.py:" in (rows["2.conv2"].where or "")


def test_a_frozen_convolution_keeps_its_input_for_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 4, 3), nn.Sigmoid())
    model[2].requires_grad_(False)
    rows = {row.name: row for row in memplan.explain(model, "2x3x16x16").layers}
    assert rows["2"].needed_for == ()
    assert rows["2"].kept_bytes == 2 * 4 * 14 * 14 * 4
    assert "although no gradient reads it" in rows["2"].why[0]


def test_a_frozen_scale_needs_the_input_for_the_input_only() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    rows = {row.name: row for row in memplan.explain(model, "4x8").layers}
    assert rows["1"].needed_for == ("input_gradient",)


def test_half_precision_copies_of_weights_count_as_weights() -> None:
    explanation = memplan.explain(lambda: mlp(64), "32x64", autocast="bf16")
    assert all(row.needed_for for row in explanation.layers if row.kept_bytes)
    linear = next(row for row in explanation.saved if row.layer == "2" and row.role == "its input")
    assert linear.needed_for == ("weight_gradient",)


def wide_head() -> nn.Module:
    """Much of the memory is in weights, so that which moment is the highest depends on the batch."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(),
        nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


@pytest.mark.parametrize(
    "make", [wide_head, *slow(small_resnet, lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 512)))]
)
# not 1: there a small convolution takes another kernel (im2col), which no other batch tells
@pytest.mark.parametrize("batch", [300, *slow(2, 4, 16, 64)])
def test_scaling_predicts_any_batch_from_one(make: Any, batch: int) -> None:
    scaling = memplan.explain(make, "8x3x32x32", optimizer=torch.optim.AdamW).scaling
    assert scaling is not None
    build = build_of(make, StepOptions(inputs=(f"{batch}x3x32x32",), optimizer=torch.optim.AdamW).checked())
    assert scaling.peak(batch) == pytest.approx(memplan.simulate(memplan.record(build)).peak_allocated, rel=0.01)
    assert scaling.peak(8) == scaling.peaks[0]
    assert scaling.fixed + 8 * scaling.per_sample == pytest.approx(scaling.peaks[0])


def test_scaling_keeps_layout_and_gradient_of_the_inputs() -> None:
    x = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    scaling = memplan.explain(small_resnet, x).scaling
    assert scaling is not None
    twice = torch.randn(16, 3, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    assert scaling.peaks[1] == memplan.explain(small_resnet, twice).timeline.peak_allocated


def test_a_step_for_one_batch_only_says_so() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table

    explanation = memplan.explain(Fixed, "8x4")
    assert explanation.scaling is None
    assert any("grows with the batch is not known" in note for note in explanation.notes)


def test_saved_under_checkpointing_is_what_is_kept_at_once() -> None:
    explanation = memplan.explain(STEPS["checkpoint_in_segments"])
    assert explanation.saved_bytes == explanation.by_cause_most["saved"]
    assert explanation.saved_bytes < memplan.explain(lambda: mlp(512, 8), "2048x512").saved_bytes


def test_what_a_layer_saves_is_what_its_formula_reads() -> None:
    saving: list[tuple[nn.Module, str]] = [
        (nn.ReLU(True), "relu saves its result"), (nn.ReLU6(True), "hardtanh saves its input"),
        (nn.Hardswish(True), "hardswish saves its input"), (nn.SiLU(True), "silu saves its input"),
        (nn.LeakyReLU(0.1, True), "leaky_relu saves its result"), (nn.Sigmoid(), "sigmoid saves its result"),
        (nn.GELU(), "gelu saves its input"), (nn.Softmax(-1), "softmax saves its result"),
        (nn.Dropout(0.2), "dropout saves its mask"), (nn.LayerNorm(16), "layer_norm saves its input"),
        (nn.PReLU(), "prelu saves its input"),
    ]  # fmt: skip
    pairs = [nn.Sequential(nn.Linear(16, 16), layer) for layer, _ in saving]
    rows = {row.name: row for row in memplan.explain(nn.Sequential(*pairs, nn.Linear(16, 16)), "4x16").layers}
    for number, (_, text) in enumerate(saving):
        assert any(why.startswith(text) for why in rows[f"{number}.1"].why), (text, rows[f"{number}.1"].why)
        assert "input_gradient" in rows[f"{number}.1"].needed_for


@pytest.mark.parametrize("train", [True, *slow(False)])
def test_the_step_that_is_explained_is_the_one_that_runs(train: bool) -> None:
    options = StepOptions(
        inputs=("8x3x32x32",),
        targets=("8:int64<10",),
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam,
        train=train,
    ).checked()
    explanation = memplan.explain(
        small_resnet,
        "8x3x32x32",
        targets=("8:int64<10",),
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam,
        train=train,
    )
    measured = measured_peak(build_of(small_resnet, options))
    assert explanation.timeline.peak_allocated == pytest.approx(measured, rel=0.01)


def test_inference_holds_less_and_saves_nothing() -> None:
    training, inference = (memplan.explain(small_resnet, "8x3x32x32", train=train) for train in (True, False))
    assert inference.saved_bytes == 0 == inference.by_cause["saved"]
    assert inference.timeline.peak_allocated < training.timeline.peak_allocated * 0.6


def test_module_factory_build_and_trace_agree() -> None:
    model, shape = mlp(64), "16x64"
    build = lambda: plain(mlp(64), torch.randn(16, 64))  # noqa: E731
    trace = memplan.record(build)
    assert memplan.explain(trace).timeline == memplan.explain(build).timeline == memplan.simulate(trace)
    from_module, from_factory = memplan.explain(model, shape), memplan.explain(lambda: mlp(64), shape)
    assert from_module.timeline.steps[1].peak_allocated == from_factory.timeline.steps[1].peak_allocated


def test_eight_billion_parameters_on_a_laptop() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(32)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    explanation = memplan.explain(Wide, "4x16384", optimizer=torch.optim.AdamW)
    assert explanation.by_cause["weight"] == 32 * (1 << 28) * 4
    assert explanation.sentence.startswith("32.0 GiB of weights -> ")


def test_outputs_with_a_loss_and_keywords() -> None:
    class Output(dict[str, torch.Tensor]):
        @property
        def loss(self) -> torch.Tensor:
            return self["loss"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
            logits = self.body(x)
            return (
                Output(loss=F.cross_entropy(logits, labels), logits=logits) if labels is not None else Output(x=logits)
            )

    explanation = memplan.explain(Model, kwargs={"x": "4x8", "labels": "4:int64<3"})
    assert any(op.startswith("nll_loss") or op == "log_softmax" for op in {row.op for row in explanation.saved})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: memplan.explain(3), TargetError, "int 3"),
        (lambda: memplan.explain(mlp(8)), InputError, "Sequential.forward.*was given no input"),
        (lambda: memplan.explain(mlp(8), "2x9"), StepError, "in layer 0"),
        (lambda: memplan.explain(lambda: 3, "2x8"), TargetError, "a module, or a step"),
        (lambda: memplan.explain(lambda: lambda: None, "2x8"), InputError, "returned a step, and inputs"),
        (
            lambda: memplan.explain(mlp(8), "2x8", loss=lambda o: o),
            InputError,
            r"the loss returned.*\(2, 8\)",
        ),
        (
            lambda: memplan.explain(mlp(8), "2x8", loss=F.cross_entropy),
            InputError,
            "the loss raised TypeError",
        ),
        (lambda: memplan.explain(mlp(8).requires_grad_(False), "2x8"), InputError, "needs a gradient"),
        (
            lambda: memplan.explain(mlp(8), "2x8", optimizer=lambda p: torch.optim.Adam(p, lr=-1)),
            InputError,
            "-1",
        ),
        (lambda: memplan.explain(mlp(8), "2x8", autocast="fp8"), InputError, "fp8"),
        (lambda: memplan.explain(memplan.record(STEPS["gru"]), "2x8"), InputError, "a Trace alone"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_a_module_with_a_lock_is_refused_by_name() -> None:
    import threading

    model = mlp(8)
    model.lock = threading.Lock()  # pyright: ignore[reportArgumentType]  # on purpose
    with pytest.raises(TargetError, match="cannot be copied"):
        memplan.explain(model, "2x8")


def test_a_large_step_is_scaled_from_one_run_at_twice_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.explanation.scaling._MANY_EVENTS", 0)
    scaling = memplan.explain(small_resnet, "32x3x32x32", optimizer=torch.optim.AdamW).scaling
    assert scaling is not None
    assert scaling.peak(32) == scaling.peaks[0]
    build = build_of(small_resnet, StepOptions(inputs=("64x3x32x32",), optimizer=torch.optim.AdamW).checked())
    assert scaling.peaks[1] == pytest.approx(memplan.simulate(memplan.record(build)).peak_allocated, rel=0.01)


def test_the_headline_of_a_converted_model_is_its_step_and_building_beside_it() -> None:
    def build() -> Any:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).to(torch.bfloat16)
        for layer in list(model)[:-1]:
            layer.requires_grad_(False)
        x = torch.randn(4, 256, dtype=torch.bfloat16)
        return lambda: model(x).sum().backward()

    sentence = memplan.explain(build).sentence
    assert sentence.startswith("1.0 MiB of weights -> ")  # 8 * 256 * 256 * 2 bytes
    assert " peak in a step: " in sentence
    assert sentence.endswith(f"; {format_bytes(measured_peak(build))} while building")
