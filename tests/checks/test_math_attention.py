"""Attention written out against the fused call: bytes as the recording of a model that has it has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks.recorded_peak import recorded_peak
from environment import slow
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.checks.attention.fused import Fusing
from memplan.checks.check import record_again
from memplan.checks.mended.changed_step import StepRecorder
from memplan.trace.recording.session import choose_target
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace

ID = "math-attention"
SHAPE = "4x256x64"

Heads = tuple[Tensor, Tensor, Tensor]


class Model(nn.Module):
    """Four heads of 16, by a function of queries, keys and values, which the model can have a table of biases for."""

    def __init__(self, attention: Callable[..., Tensor], trained: bool = False) -> None:
        super().__init__()
        self.qkv, self.attention = nn.Linear(64, 192), attention
        self.causal: Tensor
        self.register_buffer("causal", torch.ones(256, 256, dtype=torch.bool).tril())
        self.bias = nn.Parameter(torch.zeros(4, 256, 256) if trained else torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v, self)


def plain(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 4
    return torch.softmax(scores, -1) @ v


def scaled_before(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return ((q * 0.25) @ k.mT).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).div_(4).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def values_first(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    weights = torch.einsum("bhjd,bhid->bhij", k, q).mul(0.25).softmax(-1)
    return torch.einsum("bhjd,bhij->bhid", v, weights)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(
        torch.empty(16, 256, 256, dtype=q.dtype),
        q,
        k.transpose(1, 2),
        beta=0,
        alpha=0.25,
    )
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (4, 4))


def masked(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    scores = (q @ k.mT / 4).masked_fill(~model.causal, -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def where_masked(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return torch.where(model.causal, q @ k.mT / 4, torch.tensor(-1e9)).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return (q @ k.mT / 4 + model.bias).softmax(-1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return F.dropout((q @ k.mT / 4).softmax(-1), 0.1) @ v


def recomputed(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    kept: Any = checkpoint(plain, q, k, v, model, use_reentrant=False)
    return kept.tanh()


def fused(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_masked(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, model.causal)


def fused_unmasked(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    """A mask that says what to leave out is turned around first."""
    return F.scaled_dot_product_attention(q, k, v, (~model.causal).logical_not())


def fused_biased(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, model.bias[None])


def fused_dropped(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def fused_recomputed(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    kept: Any = checkpoint(fused, q, k, v, model, use_reentrant=False)
    return kept.tanh()


FORMS: dict[Any, tuple[Any, bool]] = {
    plain: (fused, False),
    scaled_before: (fused, False),
    by_einsum: (fused, False),
    values_first: (fused, False),
    by_baddbmm: (fused, False),
    masked: (fused_unmasked, False),
    where_masked: (fused_masked, False),
    biased: (fused_biased, True),
    dropped: (fused_dropped, False),
    recomputed: (fused_recomputed, False),
}
"""Ways to write attention out, the call that does the same, and whether there is a table of biases."""
NOT_ON_THE_CPU = {biased: "a bias that gets a gradient", dropped: "dropout"}


def found(make: Any, shape: str = SHAPE, device: str = "cpu", **more: Any) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(make, shape, device=device, **more) if finding.id == ID]


def peak(make: Any, device: str, **more: Any) -> int:
    return recorded_peak(make, SHAPE, device=device, **more)


@pytest.mark.parametrize(
    ("form", "device"),
    [
        *product(list(FORMS)[::2], ["h100"]),
        (plain, "cpu"),
        *slow(*product(list(FORMS)[1::2], ["h100"]), (plain, "t4"), *product(list(FORMS)[1:], ["cpu", "t4"])),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_the_bytes_are_those_that_the_fused_call_spares(form: Any, device: str) -> None:
    call, trained = FORMS[form]
    if device == "cpu" and form in NOT_ON_THE_CPU:
        pytest.skip("no fused kernel takes it there: another test")
    (finding,) = found(lambda: Model(form, trained), device=device)
    assert (finding.details["kind"], finding.details["sizes"], finding.severity) == (
        "written out",
        [[256, 256]],
        "warning",
    )
    spared = peak(lambda: Model(form, trained), device) - peak(lambda: Model(call, trained), device)
    assert finding.bytes == pytest.approx(spared, rel=0.01)
    assert spared > 4 * 4 * 256 * 256 * 4
    assert found(lambda: Model(call, trained), device=device) == []


def test_as_a_real_run_has_it() -> None:
    def build(form: Any) -> Any:
        def made() -> Any:
            model, x = Model(form), torch.randn(4, 256, 64)
            return lambda: model(x).sum().backward()

        return made

    (finding,) = [f for f in memplan.check(build(plain), device="cpu") if f.id == ID]
    written, called = (memplan.simulate(memplan.measure(build(form))).peak_allocated for form in (plain, fused))
    assert finding.bytes == pytest.approx(written - called, rel=0.01)


@pytest.mark.parametrize("train", [True, False])
def test_in_lower_precision_and_without_grad(train: bool) -> None:
    more: dict[str, Any] = {"train": train, "dtype": torch.bfloat16, "device": "h100"}
    (finding,) = [f for f in memplan.check(lambda: Model(plain), memplan.spec(SHAPE, dtype="bfloat16"), **more)
                  if f.id == ID]  # fmt: skip
    written, called = (
        recorded_peak(lambda f=f: Model(f), memplan.spec(SHAPE, dtype="bfloat16"), **more) for f in (plain, fused)
    )
    assert finding.bytes == pytest.approx(written - called, rel=0.01)


@pytest.mark.parametrize("form", NOT_ON_THE_CPU, ids=lambda form: form.__name__)
def test_where_no_fused_kernel_takes_it_nothing_is_promised(form: Any) -> None:
    (finding,) = found(lambda: Model(form, form is biased))
    assert (finding.severity, finding.bytes) == ("info", 0)
    assert f"no less here, because of {NOT_ON_THE_CPU[form]}" in finding.message


class Layers(nn.Module):
    """torch's own layer, whose weights are made by default."""

    def __init__(self, weights: bool, used: bool = False) -> None:
        super().__init__()
        self.attention, self.weights, self.used = nn.MultiheadAttention(64, 4, batch_first=True), weights, used

    def forward(self, x: Tensor) -> Any:
        out, weights = self.attention(x, x, x, need_weights=self.weights)
        return (out, weights) if self.used else out


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_weights_that_nobody_reads(device: str) -> None:
    (finding,) = found(lambda: Layers(True), device=device)
    spared = peak(lambda: Layers(True), device) - peak(lambda: Layers(False), device)
    assert finding.bytes == pytest.approx(spared, rel=0.01)
    assert "need_weights=False" in finding.advice[0]
    assert found(lambda: Layers(False), device=device) == []


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_weights_that_nobody_reads_in_inference(device: str) -> None:
    """There the layer is one op, and its matrices are that op's own."""
    (finding,) = found(lambda: Layers(True), device=device, train=False)
    assert finding.details["kind"] == "unread weights"
    spared = peak(lambda: Layers(True), device, train=False) - peak(lambda: Layers(False), device, train=False)
    assert finding.bytes == spared > 0
    assert found(lambda: Layers(False), device=device, train=False) == []
    assert found(lambda: Layers(True, used=True), device=device, train=False) == []


def test_float16_where_a_card_has_no_kernel_for_bfloat16() -> None:
    def of(dtype: torch.dtype, device: str = "t4") -> Any:
        return {"dtype": dtype, "device": device}, memplan.spec(SHAPE, dtype=str(dtype)[6:])

    (options, shape), (half, half_shape) = of(torch.bfloat16), of(torch.float16)
    (finding,) = [f for f in memplan.check(lambda: Model(fused), shape, **options) if f.id == ID]
    peaks = [
        recorded_peak(lambda: Model(fused), given, **more) for given, more in ((shape, options), (half_shape, half))
    ]
    assert finding.severity == "warning"
    assert finding.bytes == pytest.approx(peaks[0] - peaks[1], rel=0.05)  # of its own: three casts and one back
    assert "float16" in finding.advice[0]
    assert "the result is the same" not in finding.advice[0]
    options, shape = of(torch.bfloat16, "h100")
    assert [f for f in memplan.check(lambda: Model(fused), shape, **options) if f.id == ID] == []


def test_weights_that_are_wanted_are_a_note() -> None:
    for make in (lambda: Layers(True, used=True), lambda: Model(read_twice)):
        (finding,) = found(make)
        assert (finding.severity, finding.bytes) == ("info", 0)
        assert "a fused call never makes them" in finding.message


def read_twice(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    weights = (q @ k.mT / 4).softmax(-1)
    return weights @ v * weights.mean()


def thinned(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    weights = (q @ k.mT / 4).softmax(-1)
    return (weights * model.causal) @ v


def test_what_a_fused_call_does_not_do_is_told_so() -> None:
    (finding,) = found(lambda: Model(thinned))
    assert (finding.severity, finding.bytes) == ("info", 0)
    assert "does not fit here" in finding.message


def gated(q: Tensor, k: Tensor, v: Tensor, model: Model) -> Tensor:
    return (q @ k.mT / 4).sigmoid() @ v


def test_no_softmax_is_no_attention() -> None:
    assert found(lambda: Model(gated)) == []


def test_of_a_trace_no_figure_is_made_up() -> None:
    """Only what the matrices take, which is there to be seen."""

    def build() -> Any:
        model, x = Model(plain), torch.randn(4, 256, 64)
        return lambda: model(x).sum().backward()

    (finding,) = [f for f in memplan.check(memplan.record(build, device="cpu")) if f.id == ID]
    assert (finding.severity, finding.bytes) == ("info", 0)
    assert finding.details["held"] == 3 * 4 * 4 * 256 * 256 * 4  # probabilities, and two gradients
    assert "check the model itself for the bytes" in finding.advice[0]


def test_on_a_card_the_reason_is_told() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(257, 3 * 257).double()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x.double()).chunk(3, -1)
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])

    (finding,) = found(Wide, "4x512x257", device="h100")
    assert finding.details["kind"] == "math kernel"
    assert finding.bytes == 0
    assert "heads of 257" in finding.message


@pytest.mark.parametrize("head", [30, 33])
def test_heads_that_a_fused_kernel_takes_once_padded(head: int) -> None:
    class Odd(nn.Module):
        def __init__(self, padded: bool) -> None:
            super().__init__()
            self.qkv, self.padded = nn.Linear(64, 3 * head), padded

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
            if not self.padded:
                return F.scaled_dot_product_attention(q, k, v)
            q, k, v = (F.pad(t, (0, -head % 8)) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=head**-0.5)[..., :head]

    (finding,) = found(lambda: Odd(False), device="h100")
    spared = peak(lambda: Odd(False), "h100") - peak(lambda: Odd(True), "h100")
    assert spared > 0
    assert finding.bytes == pytest.approx(spared, rel=0.01)
    assert "Pad the heads to a multiple of 8" in finding.advice[0]


@pytest.mark.parametrize("device", ["rtx4090", "h100"])
def test_key_heads_that_a_fused_kernel_takes_once_repeated(device: str) -> None:
    class Grouped(nn.Module):
        def __init__(self, repeated: bool) -> None:
            super().__init__()
            self.queries, self.pairs, self.repeated = nn.Linear(64, 64), nn.Linear(64, 32), repeated

        def forward(self, x: Tensor) -> Tensor:
            q = self.queries(x).unflatten(-1, (4, 16)).transpose(1, 2)
            k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.pairs(x).chunk(2, -1))
            k, v = (F.pad(t, (0, 8)) for t in (k, v))
            if self.repeated:
                k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeated)

    (finding,) = found(lambda: Grouped(False), device=device)
    spared = peak(lambda: Grouped(False), device) - peak(lambda: Grouped(True), device)
    assert spared > 0
    assert finding.bytes == pytest.approx(spared, rel=0.01)
    assert "Repeat each key and value head" in finding.advice[0]
    model, repeating, x = Grouped(False), Grouped(True), torch.randn(2, 8, 64)
    repeating.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), repeating(x))


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_what_it_does_not_replace_is_recorded_as_ever(device: str) -> None:
    """The kernels that stand above the ops change nothing of a step where nothing is to be replaced."""
    recorder = StepRecorder(lambda: Model(dropped), StepOptions((SHAPE,)).checked(), choose_target(device))
    before = record_again(recorder)
    again = recorder.record(around=Fusing(before, [], on_card=device != "cpu").installed())
    assert isinstance(again, Trace)
    assert [op.name for op in again.ops] == [op.name for op in before.ops]
    assert [(s.bytes, s.born, s.died) for s in again.storages] == [(s.bytes, s.born, s.died) for s in before.storages]
