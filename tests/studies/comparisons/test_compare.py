"""Two steps side by side: against each step explained or measured by itself, results against torch's own, by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.networks import SmallResNet
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import memplan
from memplan.errors import InputError, StepError, TargetError, UsageError
from memplan.studies.comparisons.comparison import CAST_COPIES, WHOLE

IMAGES, LABELS = "4x3x16x16", memplan.spec("4:int64<5")
OPTIONS: dict[str, Any] = {"targets": LABELS, "loss": F.cross_entropy, "optimizer": torch.optim.AdamW, "device": "cpu"}


def stack(width: int = 8, depth: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [part for _ in range(depth) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *middle, nn.Flatten(), nn.Linear(width * 256, 5))


def test_each_side_is_what_explain_says() -> None:
    found = memplan.compare(SmallResNet, stack, IMAGES, **OPTIONS)
    for side, make in ((found.a, SmallResNet), (found.b, stack)):
        alone = memplan.explain(make, IMAGES, **OPTIONS)
        assert side.peak == alone.timeline.peak_allocated == sum(side.by_cause.values())
        assert side.by_cause == alone.by_cause
        assert {part.name: part.saved_bytes for part in side.layers} == {r.name: r.saved_bytes for r in alone.layers}
        model = make()
        count = sum(p.numel() for p in model.parameters())
        assert (side.parameters, side.weight_bytes) == (count, 4 * count)
        assert side.outputs == ("4x5 float32",)
    assert sum(row.difference for row in found.by_cause) == found.difference == found.b.peak - found.a.peak


def test_points_of_a_sweep_are_sides(tmp_path: Path) -> None:
    swept = memplan.sweep(stack, {"batch": [2, 4], "width": [8, 16]}, IMAGES, **OPTIONS, jobs=1)
    path = tmp_path / "swept.json"
    path.write_text(swept.to_json())
    found = memplan.compare(f"{path}#1", f"{path}#batch=4,width=16")
    again = memplan.compare(swept.point(1), swept.point(batch=4, width=16))
    assert found.a.title == "swept.json#1: batch 2, width 8"
    assert found.b.title == "swept.json#batch=4,width=16: batch 4, width 16"
    alone = memplan.explain(lambda: stack(16), IMAGES, **OPTIONS)
    assert found.b.peak == again.b.peak == alone.timeline.peak_allocated
    assert {cause: size for cause, size in found.b.by_cause.items() if size} == {
        cause: size for cause, size in alone.by_cause.items() if size
    }
    assert sum(found.a.by_cause.values()) == found.a.peak
    assert found.notes == ("A and B are points of a sweep, which have no layers: causes and totals alone are compared",)
    mixed = memplan.compare(swept.point(batch=4, width=16), lambda: stack(16), IMAGES, **OPTIONS)
    assert mixed.difference == 0
    assert mixed.notes == ("A is a point of a sweep, which has no layers: causes and totals alone are compared",)


def test_a_point_with_copies_of_weights_beside_a_recording_that_tells_them_apart() -> None:
    swept = memplan.sweep(stack, {"precision": ["bf16"]}, IMAGES, **OPTIONS, jobs=1)
    found = memplan.compare(swept, stack, IMAGES, **OPTIONS, autocast="bf16")
    assert found.difference == 0
    assert CAST_COPIES in found.b.by_cause
    assert "copies of weights in another dtype stand apart on the side that was recorded here alone" in found.notes


def test_no_such_point_of_a_file(tmp_path: Path) -> None:
    swept, trace = tmp_path / "swept.json", tmp_path / "trace.json"
    swept.write_text(memplan.sweep(stack, {"batch": [2, 4]}, IMAGES, **OPTIONS, jobs=1).to_json())
    trace.write_text(memplan.record(lambda: lambda: torch.zeros(3)).to_json())
    for name, words in (
        (f"{swept}", "stack has 2 points. Expected one of 1: batch 2; 2: batch 4"),
        (f"{swept}#3", "stack has no point with number 3"),
        (f"{swept}#0", "stack has no point with number 0"),
        (f"{swept}#size=3", "the axis 'size' of stack. Expected batch"),
        (f"{swept}#batch", "the point 'batch'. Expected its number"),
        (f"{trace}#1", "holds no sweep, and #1 names a point of one"),
        (f"{tmp_path / 'gone.json'}#1", "gone.json cannot be read"),
    ):
        with pytest.raises(UsageError) as error:
            memplan.compare(name, f"{swept}#1")
        assert words in str(error.value)


def test_layers_are_joined_by_name() -> None:
    found = memplan.compare(lambda: stack(depth=1), lambda: stack(depth=2), IMAGES, **OPTIONS)
    pairs = {pair.name: pair for pair in found.layers}
    assert {name for name, pair in pairs.items() if pair.a is None} == {"5", "6"}
    assert all(pair.b is not None for pair in pairs.values())
    conv = pairs["1"]
    assert conv.a is not None
    assert conv.a.weight_bytes == 4 * (8 * 8 * 9 + 8)
    assert conv.difference("weight_bytes") == 0


def test_the_outermost_modules_are_one_layer() -> None:
    class One(SmallResNet):
        pass

    found = memplan.compare(One, SmallResNet, IMAGES, **OPTIONS)
    whole = next(pair for pair in found.layers if pair.name == WHOLE)
    assert whole.a is not None
    assert whole.b is not None
    assert (whole.a.name, whole.b.name) == ("One", "SmallResNet")
    assert found.difference == 0


def test_precisions_stand_apart_with_the_copies_of_weights() -> None:
    found = memplan.compare(stack, stack, IMAGES, b_options={"autocast": "bf16"}, **OPTIONS)
    model = stack()
    assert found.a.cast_bytes == 0
    # every weight is multiplied or convolved under autocast, biases too
    assert found.b.cast_bytes == sum(2 * p.numel() for p in model.parameters())
    assert found.b.by_cause["weight"] == found.a.by_cause["weight"]
    assert found.b.by_cause.get("optimizer_state") == found.a.by_cause.get("optimizer_state")
    assert CAST_COPIES not in found.a.by_cause
    assert sum(found.b.by_cause.values()) == found.b.peak
    assert found.b.title == "stack with autocast=bf16"


def test_measured_bytes_and_results() -> None:
    model = stack()
    data, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    found = memplan.compare(
        model, model, data, targets=labels, loss=F.cross_entropy, b_options={"autocast": "bf16"}, measure=True
    )
    assert (found.a.origin, found.b.origin, found.same_weights) == ("measured", "measured", True)
    for side in (found.a, found.b):
        assert side.seconds is not None
        assert side.seconds_by == "measured on this CPU"
    output = model(data)
    gradients = torch.autograd.grad(F.cross_entropy(output, labels), list(model.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = model(data)
        loss = F.cross_entropy(lower, labels)
    lowered = torch.autograd.grad(loss, list(model.parameters()))
    assert [row.what for row in found.apart] == ["outputs", "gradients"]
    for row, one, other in zip(found.apart, ([output], gradients), ([lower], lowered), strict=True):
        flat, apart = (torch.cat([t.detach().double().flatten() for t in side]) for side in (one, other))
        assert row.tensors == len(one)
        assert row.relative == pytest.approx(float((apart - flat).norm() / flat.norm()), rel=1e-9)
        assert row.largest == pytest.approx(float((apart - flat).abs().max()), rel=1e-9)


def test_measured_agrees_with_what_is_predicted() -> None:
    # what a CPU's kernels take of their own does not grow with the batch: 12 KiB here and none there
    images = "32x3x16x16"
    options: dict[str, Any] = {**OPTIONS, "targets": memplan.spec("32:int64<5")}
    predicted = memplan.compare(stack, lambda: stack(16), images, **options)
    measured = memplan.compare(stack, lambda: stack(16), images, **options, measure=True)
    for one, other in ((predicted.a, measured.a), (predicted.b, measured.b)):
        assert one.peak == pytest.approx(other.peak, rel=0.01)
    assert measured.apart == ()
    assert any("other networks" in note for note in measured.notes)


def test_training_beside_inference() -> None:
    found = memplan.compare(stack, stack, IMAGES, device="cpu", b_options={"train": False})
    assert (found.a.train, found.b.train) == (True, False)
    assert found.a.saved_bytes
    assert found.b.saved_bytes == 0
    assert found.b.peak < found.a.peak


def pruned(amount: float = 0.5) -> nn.Sequential:
    model = stack()
    prune.l1_unstructured(model[1], "weight", amount=amount)
    return model


def test_zeros_save_nothing_and_a_mask_adds() -> None:
    masked, made_plain = pruned(), pruned()
    prune.remove(made_plain[1], "weight")
    size = 4 * 8 * 8 * 9
    found = memplan.compare(stack(), made_plain, IMAGES, device="cpu")
    assert found.difference == 0
    zeros = sum(value == 0 for value in made_plain.get_parameter("1.weight").flatten().tolist())
    assert [zero.zeros for zero in found.b.zeros] == [zeros] == [8 * 8 * 9 // 2]
    with_mask = memplan.compare(stack(), masked, IMAGES, device="cpu")
    assert with_mask.b.by_cause["buffer"] - with_mask.a.by_cause["buffer"] == size
    assert with_mask.difference > size  # the product of weight and mask, too
    recorded = memplan.compare(stack, pruned, IMAGES, device="cpu")
    assert [(zero.layer, zero.mask_bytes, zero.zeros) for zero in recorded.b.zeros] == [("1", size, None)]
    assert "a recording does not know" in str(recorded)
    ran = memplan.compare(stack, pruned, IMAGES, measure=True)
    assert ran.same_weights is False
    assert ran.b.zeros[0].zeros == 8 * 8 * 9 // 2
    assert (ran.apart[0].relative or 0) > 0


def test_a_card_has_its_roofline_and_its_rounding() -> None:
    found = memplan.compare(stack, lambda: stack(16), IMAGES, device="h100")
    assert found.a.seconds_by == "roofline of h100"
    assert found.a.reserved > found.a.peak
    assert sum(found.b.by_cause.values()) == found.b.peak


def test_what_was_saved(tmp_path: Path) -> None:
    explanation = memplan.explain(stack, IMAGES, **OPTIONS)
    trace = memplan.record(_build, device="cpu")
    plan = memplan.plan(stack, torch.randn(4, 3, 16, 16), budget="1 GiB", costs="roofline")
    trace.save(tmp_path / "trace.json")
    plan.save(tmp_path / "plan.json")
    explanation.save(tmp_path / "explanation.json")
    same = memplan.compare(explanation, tmp_path / "explanation.json")
    assert same.difference == 0
    assert same.a.layers == same.b.layers
    assert memplan.compare(trace, str(tmp_path / "trace.json")).difference == 0
    planned = memplan.compare(plan, tmp_path / "plan.json")
    assert planned.a.peak == plan.peak == sum(planned.a.by_cause.values())
    assert planned.decided_otherwise == ()
    mixed = memplan.compare(stack, plan, IMAGES, device="cpu")
    assert any("recorded, B planned" in note for note in mixed.notes)


def test_two_plans_and_what_they_decide_otherwise() -> None:
    model, data = SmallResNet(), torch.randn(8, 3, 32, 32)
    loose = memplan.plan(model, data, budget="1 GiB", costs="roofline")
    tight = memplan.plan(model, data, budget=loose.floor, costs="roofline")
    found = memplan.compare(loose, tight)
    assert (found.a.peak, found.b.peak) == (loose.peak, tight.peak)
    levers = [
        {str(one.scope): one.lever for one in plan.decisions if one.scope.kind == "value"} for plan in (loose, tight)
    ]
    expected = {name for name in levers[0] | levers[1] if levers[0].get(name) != levers[1].get(name)}
    assert {row.value for pair in found.decided_otherwise for row in pair if row is not None} == expected != set()
    kept = sum(one.bytes for one in loose.decisions if one.lever == "keep" and one.scope.kind == "value")
    assert found.a.saved_bytes == kept
    assert found.b.seconds == tight.total_seconds


def _build() -> Any:
    model, data = stack(), torch.randn(4, 3, 16, 16)
    return lambda: model(data).sum().backward()


def test_a_model_is_left_as_it_was() -> None:
    model = stack()
    before = copy.deepcopy(model.state_dict())
    memplan.compare(model, model, IMAGES, b_options={"autocast": "bf16"}, measure=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("a", "b", "more", "kind", "said"),
    [
        (stack, stack, {}, InputError, "the same step twice"),
        (stack, "4x3x16x16", {}, TargetError, "cannot be read"),
        (stack, 3, {}, TargetError, "int 3. Expected two steps"),
        (stack, stack, {"b_options": {"batch": 3}}, InputError, "b_options 'batch'"),
        (stack, nn.Linear(3, 4), {}, StepError, "Linear: step 1 raised"),
        (stack, _build, {}, InputError, "_build: _build returned a step"),
    ],
)
def test_pairs_that_are_none(a: Any, b: Any, more: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        memplan.compare(a, b, IMAGES, device="cpu", **more)
    assert said in str(caught.value)


def test_two_saved_ones_take_no_options() -> None:
    trace = memplan.record(_build, device="cpu", steps=1)
    other = memplan.record(_build, device="cpu")
    with pytest.raises(InputError, match="two steps that were recorded before, and inputs"):
        memplan.compare(trace, other, IMAGES)
    with pytest.raises(InputError, match="measuring was asked for"):
        memplan.compare(trace, _build, measure=True)
    with pytest.raises(InputError, match="b_options for Trace"):
        memplan.compare(_build, trace, b_options={"device": "cpu"})


def test_other_devices_are_told() -> None:
    found = memplan.compare(stack, stack, IMAGES, device="cpu", b_options={"device": "h100"})
    assert "A is for cpu, B for h100" in " ".join(str(found).split())


def test_settings_are_those_of_a_recorded_trace_too() -> None:
    def build() -> Callable[[], None]:
        kept = [torch.randn(3 << 18) for _ in range(8)]
        return lambda: kept.append(torch.randn(13 << 18))

    settings = "expandable_segments:True"
    trace = memplan.record(build, device="h100")
    reserved = [memplan.simulate(trace, settings=each).peak_reserved for each in (settings, None)]
    assert reserved[0] != reserved[1]
    for each, peak in zip((settings, None), reserved, strict=True):
        compared = memplan.compare(trace, build, device="h100", settings=each)
        assert (compared.a.reserved, compared.b.reserved) == (peak, peak)
