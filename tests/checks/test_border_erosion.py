"""Border erosion against a brute-force probe, against arithmetic known from papers, and against padded models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks.random_stacks import Layer, interior_size, module_of, probed, reach, stacks
from checks.recorded_peak import recorded_peak
from environment import needs_avx512
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memplan
from memplan.checks.check import check_trace
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import at_least

ID = "border-erosion"


def lost(model: Any, shape: tuple[int, ...], **more: Any) -> list[tuple[float, float]]:
    """What `check` says; zeros where it says nothing."""
    text = "x".join(map(str, shape))
    build = build_of(model, StepOptions((text,), train=False).checked())
    found = [f for f in check_trace(memplan.record(build, device="cpu", steps=1), **more) if f.id == ID]
    return found[0].details["lost"] if found else [(0, 0)] * (len(shape) - 2)


@pytest.mark.parametrize(
    ("dims", "most", "examples", "least"),
    [
        (2, 4, 20, 15),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 6, 140, 120), (2, 4, 50, 40), (3, 2, 60, 30))),
    ],
)
def test_as_the_probe(dims: int, most: int, examples: int, least: int) -> None:
    tried = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(stacks(dims, most), st.integers(0, 5))
    def holds(layers: list[Layer], extra: int) -> None:
        nonlocal tried
        layers = [("conv", 1, 1, 1, 0), *layers]  # what no kernel slides along is no spatial dimension
        size = interior_size(layers, extra)
        if size > {1: 4000, 2: 300, 3: 72}[dims]:
            return
        expected, outputs = probed(module_of(layers, dims, probe=True), size, dims, reach(layers)[1])
        model = module_of(layers, dims, probe=False)
        assert model(torch.zeros(1, 2, *[size] * dims)).shape[2] == outputs
        assert lost(model, (1, 2, *[size] * dims)) == [(float(a), float(b)) for a, b in expected], layers
        tried += 1

    holds()
    assert tried >= least


class Double(nn.Sequential):
    """Two unpadded convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(nn.Conv2d(before, after, 3), nn.ReLU(True), nn.Conv2d(after, after, 3), nn.ReLU(True))


class ValidUNet(nn.Module):
    """The U-Net as published (arXiv:1505.04597): 572 pixels in, 388 out."""

    def __init__(self, width: int = 4, levels: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(width if k else 1, width) for k in range(levels)])
        self.bottom = Double(width, width)
        self.up = nn.ModuleList([nn.ConvTranspose2d(width, width, 2, 2) for _ in range(levels)])
        self.right = nn.ModuleList([Double(2 * width, width) for _ in range(levels)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, block in zip(self.up, self.right, strict=True):
            x, skip = up(x), skips.pop()
            edge = (skip.shape[2] - x.shape[2]) // 2
            x = block(torch.cat([skip[:, :, edge : edge + x.shape[2], edge : edge + x.shape[3]], x], 1))
        return self.head(x)


def padded_unet() -> nn.Module:
    model = ValidUNet()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.padding = (1, 1)
    return model


def test_the_published_unet_loses_92_pixels() -> None:
    (finding,) = erosions(ValidUNet, "1x1x572x572")
    assert finding.details["output"] == [388, 388]
    assert finding.details["lost"] == [(92, 92), (92, 92)]
    by_layer = {row["layer"]: row["lost"][0] for row in finding.details["layers"]}
    assert by_layer["down.0.0"] == (1, 1)  # a pixel, and behind each pool twice as many of the input
    assert by_layer["down.3.2"] == (8, 8)
    assert by_layer["bottom.0"] == (16, 16)
    assert sum(before for before, _ in by_layer.values()) == 92


@pytest.mark.slow
def test_context_is_no_loss() -> None:
    assert erosions(ValidUNet, "1x1x572x572", context=92) == []
    assert erosions(ValidUNet, "1x1x572x572", context=91) != []


def test_padded_it_loses_nothing() -> None:
    assert erosions(padded_unet, "1x1x64x64") == []


@pytest.mark.slow
def test_the_bytes_are_those_of_the_padded_model() -> None:
    (finding,) = erosions(ValidUNet, "2x1x188x188")
    build = lambda make: memplan.record(build_of(make, StepOptions(("2x1x188x188",)).checked()), device="cpu")  # noqa: E731
    padded, bare = (memplan.simulate(build(make)).peak_allocated for make in (padded_unet, ValidUNet))
    assert finding.bytes == padded - bare
    assert finding.details["padded_peak"] == padded
    assert finding.details["plan_smallest_budget"] < padded


@pytest.mark.slow
def test_a_plan_takes_the_bytes_back() -> None:
    """What the finding says is what `memplan.plan` finds for the padded model in the unpadded one's peak."""
    wide = lambda padding: nn.Sequential(  # noqa: E731
        *[
            nn.Sequential(nn.Conv2d(1 if k == 0 else 8, 8, 3, padding=padding), nn.BatchNorm2d(8), nn.ReLU())
            for k in range(6)
        ]
    )
    (finding,) = erosions(lambda: wide(0), "4x1x64x64")
    planned = memplan.plan(lambda: wide(1), "4x1x64x64", budget=finding.details["peak"], costs="roofline")
    assert finding.details["plan_seconds"] == planned.seconds > 0
    assert planned.peak <= finding.details["peak"]
    assert "with a plan that adds" in finding.advice[0]


@pytest.mark.parametrize(
    ("size", "device"), [(572, "cpu"), (576, "h100")]
)  # padded, only the second gives sizes that all strides divide
def test_of_a_trace_the_bytes_are_those_of_the_padded_model(size: int, device: str) -> None:
    """Nothing can be made anew of it: the ops of the step are run again, with padding."""
    options = StepOptions((f"2x1x{size}x{size}",), optimizer=torch.optim.AdamW).checked()
    record = lambda make: memplan.record(build_of(make, options), device=device, cudnn=False)  # noqa: E731
    (finding,) = [f for f in memplan.check(record(ValidUNet)) if f.id == ID]
    before, after = (memplan.simulate(at_least(record(make))).peak_allocated for make in (ValidUNet, padded_unet))
    assert finding.bytes == pytest.approx(after - before, rel=0.01)
    assert (finding.details["peak"], finding.details["padded_peak"]) == (before, after)


class Functional(nn.Module):
    """Convolutions and pools that are no modules, with one that is."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.first, self.padding = nn.Conv3d(1, 8, 3, padding=padding), padding
        self.weight = nn.Parameter(torch.zeros(8, 8, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv3d(self.first(x).relu(), self.weight, padding=self.padding)
        return F.avg_pool3d(x, 3, 1, self.padding).sigmoid()


@pytest.mark.parametrize("train", [True, False])
def test_of_functions_the_bytes_are_those_of_padded_ones(train: bool) -> None:
    (finding,) = erosions(Functional, "1x1x20x24x28", train=train)
    peaks = [recorded_peak(lambda p=p: Functional(p), "1x1x20x24x28", device="cpu", train=train) for p in (0, 1)]
    assert finding.details["lost"] == [(3, 3)] * 3
    assert finding.bytes == pytest.approx(peaks[1] - peaks[0], rel=0.01)


@pytest.mark.usefixtures("two_threads")
@needs_avx512
def test_a_model_that_does_not_run_with_padding() -> None:
    """Its crops are written down as numbers: what it would take is worked out from the step."""

    class Cropping(nn.Module):
        def __init__(self, padded: bool = False) -> None:
            super().__init__()
            self.padded = padded
            self.left, self.right = nn.Conv2d(1, 4, 3, padding=int(padded)), nn.Conv2d(4, 4, 5, padding=2 * padded)
            self.last = nn.Conv2d(8, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            left = self.left(x)
            right = self.right(left)
            return self.last(torch.cat([left if self.padded else left[:, :, 2:-2, 2:-2], right], 1))

    (finding,) = erosions(Cropping, "2x1x64x64")
    peaks = [recorded_peak(lambda p=p: Cropping(p), "2x1x64x64", device="cpu") for p in (False, True)]
    assert finding.bytes == pytest.approx(peaks[1] - peaks[0], rel=0.01)


def test_a_target_that_has_the_size_of_what_is_left() -> None:
    loss, shapes = nn.functional.mse_loss, ("2x1x64x64", "2x1x48x48")
    stack = lambda padding=0: nn.Sequential(*[nn.Conv2d(1, 1, 5, padding=padding) for _ in range(4)])  # noqa: E731
    record = lambda make, target: memplan.record(  # noqa: E731
        build_of(make, StepOptions((shapes[0],), targets=(target,), loss=loss).checked()), device="cpu"
    )
    (finding,) = [f for f in memplan.check(record(stack, shapes[1])) if f.id == ID]
    before, after = record(stack, shapes[1]), record(lambda: stack(2), shapes[0])
    assert finding.bytes == pytest.approx(
        memplan.simulate(after).peak_allocated - memplan.simulate(before).peak_allocated, rel=0.01
    )


def test_where_it_cannot_be_known_no_figure_is_given() -> None:
    """Kernels of even size need more padding on one side, which is another op; a recording alone has none to add."""

    def build() -> Any:
        model, x = nn.Sequential(nn.Conv2d(1, 4, 4), nn.Conv2d(4, 4, 4)), torch.randn(1, 1, 32, 32)
        return lambda: model(x).sum().backward()

    (finding,) = [f for f in memplan.check(memplan.record(build, device="cpu")) if f.id == ID]
    assert finding.bytes == 0
    assert "saves" not in finding.message
    assert "how much it takes is not known: 0 has a kernel of even size" in finding.advice[0]


def test_a_mirrored_input_leaves_the_interior_as_it_is() -> None:
    from memplan.checks.borders.mirror import Mirrored, mirrored
    from memplan.checks.fields.walk import follow

    torch.manual_seed(0)
    model, x = ValidUNet().double(), torch.randn(1, 1, 188, 188, dtype=torch.double)
    trace = memplan.record(build_of(model, StepOptions((x,), train=False).checked()), device="cpu", steps=1)
    followed = follow(trace)
    mirror = mirrored(trace, followed.outputs[0], followed)
    assert mirror is not None
    assert mirror.pads == ((96, 96), (96, 96))  # 92, and so many more that every pixel keeps its place under the pools
    with torch.no_grad():
        whole, inner = Mirrored(model, mirror)(x), model(x)
    assert whole.shape[2:] == x.shape[2:]
    torch.testing.assert_close(whole[:, :, 92:-92, 92:-92], inner)


def test_a_shift_is_only_a_note() -> None:
    """A strided convolution of odd kernel stands on the first of its two pixels: nothing is lost in sum."""
    (finding,) = erosions(lambda: nn.Conv2d(1, 1, 3, 2, 1), "1x1x16x16")
    assert finding.severity == "info"
    assert finding.details["lost"] == [(0, 0.5), (0, 0.5)]


def test_a_model_whose_output_has_no_positions_loses_none() -> None:
    net = lambda: nn.Sequential(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 12 * 12, 10))  # noqa: E731
    assert erosions(net, "1x1x28x28") == []


def test_the_share_of_outputs_that_see_padding() -> None:
    """Counted by hand: 2 unpadded and 1 padded layer of kernel 3, 16 pixels: outputs 0 and 11 of 12 see the padding."""
    net = lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3))  # noqa: E731
    (finding,) = erosions(net, "1x1x16x16")
    assert finding.details["lost"] == [(2, 2), (2, 2)]
    assert finding.details["receptive_field"] == [7, 7]
    assert finding.details["touching_padding"] == pytest.approx(1 - (10 / 12) ** 2, abs=1e-4)


def test_the_effective_field_of_a_deep_stack_is_that_of_random_weights() -> None:
    """Luo et al. 2016 measure it as the root of the area above 1 - 95.45 % of the peak; ours is two deviations."""
    (finding,) = erosions(lambda: nn.Sequential(*[nn.Conv1d(1, 1, 3) for _ in range(40)]), "1x1x200")
    x = torch.ones(1, 1, 200, dtype=torch.double, requires_grad=True)
    y = x
    for _ in range(40):
        y = F.conv1d(y, torch.ones(1, 1, 3, dtype=torch.double) / 3)
    (gradient,) = torch.autograd.grad(y[0, 0, 60], x)
    places = torch.arange(200)
    mean = (gradient[0, 0] * places).sum()
    deviation = ((gradient[0, 0] * (places - mean) ** 2).sum()).sqrt()
    assert finding.details["effective_receptive_field"][0] == pytest.approx(4 * float(deviation) + 1, abs=0.1)


def erosions(model: Any, *shapes: str, **more: Any) -> list[memplan.Finding]:
    return [finding for finding in memplan.check(model, *shapes, device="cpu", **more) if finding.id == ID]


@pytest.mark.slow
def test_fifty_layers_lose_fifty_pixels_on_each_side() -> None:
    stack = nn.Sequential(*[nn.Conv2d(1, 1, 3) for _ in range(50)])
    (finding,) = erosions(stack, "1x1x128x120")
    assert finding.severity == "warning"
    assert finding.details["lost"] == [(50, 50), (50, 50)]
    assert finding.details["receptive_field"] == [101, 101]
    assert finding.details["share"] == pytest.approx(1 - 28 * 20 / (128 * 120))
    assert [row["lost"] for row in finding.details["layers"]] == [[(1, 1), (1, 1)]] * 50
    assert "50 pixels on each side, 100 per dimension" in finding.message


class Warped(nn.Module):
    """Two unpadded convolutions, a resampling by a grid of the model's own, one more."""

    def __init__(self, before: int = 0, after: int = 0) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(1, 2, 3, padding=before), nn.Conv2d(2, 2, 3, padding=before))
        self.turn, self.after = nn.Parameter(torch.eye(2, 3)), nn.Conv2d(2, 1, 5, padding=after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        grid = F.affine_grid(self.turn[None], [1, 2, 30, 30], align_corners=False)
        return self.after(F.grid_sample(x, grid, align_corners=False))


def test_where_positions_depend_on_values_the_path_ends_and_begins_anew() -> None:
    (finding,) = erosions(Warped, "1x1x32x32")
    assert finding.details["lost"] == [(2, 2), (2, 2)]  # of what the resampling makes, by the last convolution
    assert finding.details["input"] == [30, 30]
    assert finding.details["from"]["op"] == "grid_sampler_2d"
    assert finding.message.startswith("the output covers what grid_sampler_2d in Warped makes (the path ends")
    (finding,) = erosions(lambda: Warped(after=2), "1x1x32x32")
    assert finding.details["lost"] == [(2, 2), (2, 2)]  # of the input, by the two before
    assert [row["layer"] for row in finding.details["layers"]] == ["before.0", "before.1"]
    assert finding.message.startswith("what goes into grid_sampler_2d in Warped covers the input (the path ends")
    assert erosions(lambda: Warped(1, 2), "1x1x32x32") == []


@pytest.mark.parametrize("padding", [0, 1])
def test_a_model_that_runs_on_tiles_loses_its_own_border_alone(padding: int) -> None:
    """The tiles cover the input together, so what one of them leaves out is not lost."""

    def build() -> Any:
        model, volume = nn.Conv2d(1, 1, 3, padding=padding), torch.randn(1, 1, 24, 24)

        def step() -> None:
            with torch.no_grad():
                for row in (0, 8):
                    for column in (0, 8):
                        model(volume[:, :, row : row + 16, column : column + 16])

        return step

    found = [f.details["lost"] for f in memplan.check(build, device="cpu") if f.id == ID]
    assert found == ([] if padding else [[(1, 1), (1, 1)]])


def test_a_single_crop_of_the_input_is_lost() -> None:
    def build() -> Any:
        model, image = nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 24, 24)

        def step() -> None:
            with torch.no_grad():
                model(image[:, :, 4:20, :20])

        return step

    assert [f.details["lost"] for f in memplan.check(build, device="cpu") if f.id == ID] == [[(4, 4), (0, 4)]]


def test_inference_is_offered_as_a_way_that_keeps_the_border() -> None:
    """The call that the advice names, for a network that loses its border: the same outputs, in parts."""
    model = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 1, 5)).eval()
    image = torch.randn(1, 1, 96, 96)
    (finding,) = [one for one in memplan.check(model, image, train=False) if one.id == "border-erosion"]
    assert "memplan.fit(model.eval(), image, budget=..., train=False)" in finding.advice[-1]
    with torch.no_grad():
        whole = model(image)
        fitted = memplan.fit(model, image, budget="50%", train=False)
        assert fitted.changed
        torch.testing.assert_close(model(image), whole, rtol=1e-5, atol=1e-5)
