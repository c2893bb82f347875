"""The sum that nvidia-smi would show, and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from environment import thinned
from torch import nn

import memplan
from memplan.cudnn.questions import ExecutionPlan
from memplan.devices import catalogue, find
from memplan.explanation.card import _charges
from memplan.explanation.model import CardUse, ChargeName, smaller_plans_sentence, verdict_sentence
from memplan.trace.records import Engines

MIB = 1 << 20


class Mlp(nn.Module):
    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(autouse=True)
def torchs_own_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """MONAI sets it on import, and another test may have imported MONAI."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def explained(what: Any = Mlp, *inputs: Any, device: str = "h100", **more: Any) -> memplan.Explanation:
    return memplan.explain(what, *(inputs or ("256x1024",)), device=device, **more)


def card_of(explanation: memplan.Explanation) -> CardUse:
    assert explanation.card is not None
    return explanation.card


def test_the_sum_is_what_is_reserved_and_the_context() -> None:
    explanation = explained(optimizer=torch.optim.AdamW)
    charges = {charge.name: charge for charge in card_of(explanation).charges}
    context = charges["context"]
    assert sum(c.high for c in charges.values()) == explanation.timeline.peak_reserved + context.high
    # NVML's bytes of a process on a real H100 that multiplied matrices with torch 2.11
    assert context.low == context.high == pytest.approx(677 * MIB, rel=0.05)
    # cuBLAS on Hopper, 32 MiB for the thread of forward and for that of backward; cuBLASLt's own, for `linear`
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    held = 65 if version < (2, 12) else 64 if version < (2, 15) else 32
    assert charges["workspace"].high == held * MIB
    assert charges["rounding"].high >= 0
    assert charges["fragmentation"].high >= 0
    assert card_of(explanation).verdict.high == sum(c.high for c in charges.values())


def test_causes_add_up_at_both_peaks() -> None:
    explanation = explained(optimizer=torch.optim.AdamW)
    timeline = explanation.timeline
    assert sum(explanation.by_cause.values()) == timeline.peak_allocated
    assert sum(explanation.by_cause_reserved.values()) == timeline.peak_reserved
    assert explanation.by_cause["weight"] == sum(p.numel() * 4 for p in Mlp().parameters())
    assert explanation.by_cause["optimizer_state"] >= 2 * explanation.by_cause["weight"]


def test_every_card_gets_a_verdict_and_the_smallest_that_fits_is_named() -> None:
    """By hand: weights, gradients and two states of AdamW alone are 16 bytes a parameter."""
    use = card_of(explained(lambda: Mlp(8192, 16), "16x8192", optimizer=torch.optim.AdamW))
    parameters = 16 * (8192 * 8192 + 8192)
    assert [verdict.device for verdict in use.others] == [device.name for device in catalogue()]
    for verdict in use.others:
        if verdict.capacity < 16 * parameters:
            assert verdict.answer == "does not fit"
        if verdict.capacity > 26 * parameters:
            assert verdict.answer == "fits"
    fitting = [verdict for verdict in use.others if verdict.answer == "fits"]
    assert use.smallest == min(fitting, key=lambda verdict: verdict.capacity).device


def test_a_card_that_is_too_small_is_told() -> None:
    explanation = explained(lambda: Mlp(8192, 16), "16x8192", optimizer=torch.optim.AdamW, device="t4")
    assert card_of(explanation).verdict.answer == "does not fit"
    assert "does not fit on NVIDIA T4" in str(explanation)


def test_without_cudnn_a_convolution_is_an_interval_and_linear_layers_are_not() -> None:
    plain = card_of(explained())
    assert all(charge.low == charge.high for charge in plain.charges)
    assert plain.allocated_band is None
    use = card_of(explained(lambda: nn.Conv3d(16, 32, 3, padding=1), "2x16x32x32x32", cudnn=False))
    workspace = next(c for c in use.charges if c.name == "workspace")
    assert workspace.low <= workspace.high
    assert use.verdict.low < use.verdict.high
    assert use.verdict.band is None
    context = next(c for c in use.charges if c.name == "context")
    assert (context.low, context.high) == find("h100").context


def test_an_expected_workspace_is_one_number_with_a_band() -> None:
    explanation = explained(lambda: nn.Conv3d(24, 40, 3, padding=1), "2x24x36x36x36", device="a100-80gb")
    use = card_of(explanation)
    assert all(charge.low == charge.high for charge in use.charges)
    assert use.verdict.low == use.verdict.high == sum(charge.low for charge in use.charges)
    assert use.allocated_band is not None
    assert use.verdict.band is not None
    low, high = use.allocated_band
    assert low <= explanation.timeline.peak_allocated <= high
    assert use.verdict.band[0] < use.verdict.low < use.verdict.band[1]


def test_a_module_and_its_inputs_go_to_the_card_and_the_host_does_not_count() -> None:
    class WithHostTensor(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            torch.zeros(1 << 20)  # on the host
            return super().forward(input)

    weights = 1000 * 1000 * 4 + 1000 * 4
    explanation = explained(lambda: WithHostTensor(1000, 1000), "10x1000", train=False)
    assert explanation.by_cause["weight"] == weights
    assert explanation.by_cause["input"] == 10 * 1000 * 4
    assert explanation.by_cause_most["temporary"] < 1 << 20


def test_the_users_module_stays_where_it_is() -> None:
    model = Mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explained(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_trace_of_a_gpu_outside_of_the_catalogue_is_explained_without_a_verdict() -> None:
    from dataclasses import replace

    def build() -> Any:
        x = torch.zeros(1000, device="cuda")
        return lambda: x * 2

    trace = replace(memplan.record(build, device="h100"), device="rtx9999")
    explanation = memplan.explain(trace)
    assert explanation.card is None
    assert explanation.timeline.peak_allocated == 2 * 4096


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_cudas(precision: str) -> None:
    explanation = explained(autocast=precision)
    # by hand: of each layer, the inputs of the product and of GELU in half precision; cast weights until forward ends
    saved = 4 * 2 * (256 * 1024 * 2)
    assert explanation.saved_bytes >= saved
    assert explanation.saved_bytes < saved + 4 * 1024 * 1024 * 2 + 4 * MIB


@pytest.mark.parametrize(
    ("make", "shape"),
    thinned([
        (lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)), "8x3x64x64"),
        (lambda: nn.LSTM(64, 128, 2, dropout=0.1), "50x16x64"),
        (lambda: cast(Any, nn.Conv3d(1, 8, 3)).to(memory_format=torch.channels_last_3d),
         "2x1x24x24x24"),
        (lambda: nn.TransformerEncoderLayer(64, 4, batch_first=True), "8x32x64"),
    ], 2),
)  # fmt: skip
def test_rounding_is_no_more_than_blocks_can_waste(make: Any, shape: str) -> None:
    """Less than 512 bytes a block, and of one over 1 MiB what its segment leaves: at most 1 MiB."""
    explanation = explained(make, shape, device="rtx3090")
    rounding = explanation.by_cause["rounding"]
    assert rounding >= 0
    blocks = len(explanation.timeline.log)
    assert rounding <= 511 * blocks + MIB * sum(e.action == "alloc" and e.size > MIB for e in explanation.timeline.log)
    assert all(size >= 0 for size in explanation.by_cause_reserved.values())
    for charge in card_of(explanation).charges:
        assert charge.low >= 0


def test_what_a_recurrent_network_keeps_is_saved() -> None:
    """cuDNN's reserve: five values for every hidden unit, layer, step and sample, and the layers between."""
    explanation = explained(lambda: nn.LSTM(64, 128, 2), "50x16x64", device="rtx3090")
    reserve = 50 * 16 * 4 * (2 * 5 * 128 + 128)
    assert explanation.saved_bytes >= reserve
    assert explanation.by_cause_most["saved"] >= reserve


def test_the_fast_path_of_an_encoder_takes_what_it_takes_on_the_cpu() -> None:
    """One op on both: its feed-forward's inner tensor alone, 16 x 128 x 2048 floats, is 16 MiB."""
    explanation = memplan.explain(
        lambda: nn.TransformerEncoderLayer(256, 4, batch_first=True), "16x128x256", device="a100", train=False
    )
    assert explanation.timeline.peak_allocated > 16 * 128 * 2048 * 4


@pytest.mark.parametrize("card", ["a100", "rtx4090"])
def test_no_term_is_lower_in_the_high_case(card: str) -> None:
    """A convolution's workspace can be larger than all tensors of the peak, and move it elsewhere."""

    def make() -> nn.Module:
        wide = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv3d(8, 8, 3, padding=1))
        return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), wide, nn.AdaptiveAvgPool3d(8), nn.Conv3d(8, 512, 8))

    use = card_of(explained(make, "2x1x48x48x48", device=card))
    assert all(charge.low <= charge.high for charge in use.charges)
    assert sum(charge.low for charge in use.charges) == use.verdict.low
    assert sum(charge.high for charge in use.charges) == use.verdict.high


def test_what_a_high_case_adds_stands_with_its_workspaces() -> None:
    """By hand: the high peak is elsewhere, with 1500 bytes of tensors fewer and workspaces of 3000 more."""
    low: dict[ChargeName, int] = {
        "tensors": 2000,
        "workspace": 100,
        "rounding": 50,
        "fragmentation": 500,
        "context": 10,
    }
    high: dict[ChargeName, int] = {
        "tensors": 500,
        "workspace": 3100,
        "rounding": 60,
        "fragmentation": 400,
        "context": 20,
    }
    charges = {charge.name: (charge.low, charge.high) for charge in _charges(low, high)}
    assert charges == {
        "tensors": (2000, 2000), "workspace": (100, 1510), "rounding": (50, 50), "fragmentation": (500, 500),
        "context": (10, 20),
    }  # fmt: skip


def test_a_verdict_that_rests_on_cached_blocks_says_so() -> None:
    use = card_of(explained())
    tight = dataclasses.replace(
        use.verdict, capacity=24 * MIB, low=25 * MIB, high=100 * MIB, answer="low only", band=None
    )
    sentence = verdict_sentence(dataclasses.replace(use, verdict=tight))
    assert "takes 25.0 MiB to 100.0 MiB where there is room, and in 24.0 MiB gives cached blocks back" in sentence
    assert "needs" not in sentence


def three_convolutions(seconds: tuple[ExecutionPlan, ...]) -> memplan.Trace:
    """Three convolutions in a row, with workspaces by hand; the plans of the second are given."""

    def build() -> Any:
        model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))).cuda()
        data = torch.zeros(1, 8, 512, 512, device="cuda")

        def step() -> None:
            with torch.no_grad():
                model(data)

        return step

    trace = memplan.record(build, device="rtx3090", steps=1, cudnn=False)
    kept = [one for one in trace.storages if one.cause == "workspace"]
    assert len(kept) == 3
    plans = ((ExecutionPlan("eng1", 4 * MIB),), seconds, (ExecutionPlan("eng1", 4 * MIB),))
    sizes = {one.id: of[0].workspace for one, of in zip(kept, plans, strict=True)}
    storages = (dataclasses.replace(one, bytes=sizes.get(one.id, one.bytes), low=None) for one in trace.storages)
    engines = tuple(Engines(one.id, of) for one, of in zip(kept, plans, strict=True))
    return dataclasses.replace(trace, storages=tuple(storages), engines=engines)


GIB = 1 << 30
LARGE, SMALL = ExecutionPlan("eng7", 30 * GIB), ExecutionPlan("eng0", 2 * MIB)


def test_a_layer_that_has_no_room_for_its_first_plan_is_named() -> None:
    """An RTX 3090 has 24 GiB: the second of three convolutions runs the smaller of its two plans."""
    explanation = memplan.explain(three_convolutions((LARGE, SMALL)))
    use = card_of(explanation)
    (smaller,) = use.smaller
    assert (smaller.layer, smaller.first, smaller.taken) == ("1", LARGE, SMALL)
    assert use.verdict.answer == "fits"
    said = (
        "no room for cuDNN's first plan: conv2d of 1 runs eng0 with 2.0 MiB of workspace, instead of eng7 with 30.0 GiB"
    )
    assert smaller_plans_sentence(use) == said
    assert said in " ".join(str(explanation).split())
    assert explanation.to_dict()["card"]["smaller"][0]["taken"] == {"engine": "eng0", "workspace": 2 * MIB}


def test_nothing_is_named_where_all_fits_or_nothing_helps() -> None:
    assert card_of(memplan.explain(three_convolutions((SMALL,)))).smaller == ()
    none = card_of(memplan.explain(three_convolutions((LARGE,))))
    assert (none.smaller, none.verdict.answer) == ((), "does not fit")
    assert smaller_plans_sentence(none) == ""


def test_a_saved_band_that_does_not_hold_the_expected_bytes_is_refused() -> None:
    saved = explained().to_dict()
    low, high = saved["card"]["verdict"]["band"]
    assert low < saved["card"]["verdict"]["low"] < high
    saved["card"]["verdict"]["band"] = [high, high]
    with pytest.raises(memplan.MemplanError, match="outside of their band"):
        memplan.Explanation.from_dict(saved)
