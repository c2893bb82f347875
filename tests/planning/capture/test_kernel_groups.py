"""Groups of calls that kernels replace: recognized in many spellings, and left alone where a kernel does not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from environment import slow, thinned
from torch import Tensor, nn
from torch.nn import functional as F

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops
from memplan.planning.capture.call_log import CallLog
from memplan.planning.capture.capture import Captured, capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.kernel_groups import kernel_groups
from memplan.planning.capture.replaced_calls import GroupGone
from memplan.planning.graph.joint_graph import map_refs
from memplan.planning.graph.op_schema import overload

WIDTH, CLASSES, EPS = 24, 50, 1e-5
Function = Callable[..., Any]


class Step(nn.Module):
    """A function of an input and a weight between two linear layers, and its sum of squares; so that it has a
    gradient."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.first(x), self.weight, self.last)


class Scores(nn.Module):
    """A head of some classes, and a loss of its scores."""

    def __init__(self, loss: Function, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.first, self.head = loss, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        self.to(dtype)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.loss(self.head(self.first(x)), targets)


# -- norms


def llama(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """As transformers' LlamaRMSNorm has it."""
    dtype = x.dtype
    h = x.to(torch.float32)
    variance = h.pow(2).mean(-1, keepdim=True)
    h = h * torch.rsqrt(variance + EPS)
    return last(weight * h.to(dtype))


def t5(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """The input is cast for the mean alone."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + EPS)
    return last(weight * h.to(weight.dtype))


def gemma(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """Around 1, cast behind the weight."""

    def norm(h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)

    return last((norm(x.float()) * (1.0 + weight.float())).type_as(x))


def divided(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last(x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + EPS) * weight)


def inverted(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last(x * (1.0 / torch.sqrt((x**2).mean([2], keepdim=True) + EPS)) * weight)


def to_a_power(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last(x.mul(x.square().mean(2, True).add(EPS).pow(-0.5)).mul(weight))


def own(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """As torch.nn.RMSNorm calls it."""
    return last(F.rms_norm(x, (WIDTH,), weight, EPS))


NORMS = [llama, t5, gemma, divided, inverted, to_a_power, own]


# -- gated activations


def swiglu(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last(F.silu(x) * (x * weight + 1))


def by_sigmoid(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last((x * weight) * (x * torch.sigmoid(x)))


def halves(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    gate, up = torch.cat((x, x * weight), -1).chunk(2, dim=-1)
    return last(up * nn.functional.silu(gate))


def geglu(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last((x * weight) * F.gelu(x, approximate="tanh"))


# -- losses


def plain(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def shifted(scores: Tensor, targets: Tensor) -> Tensor:
    """As transformers has it."""
    scores = scores.float()[..., :-1, :].contiguous()
    targets = targets[..., 1:].contiguous()
    return F.cross_entropy(scores.view(-1, CLASSES), targets.view(-1), ignore_index=3, reduction="mean")


def transposed(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), targets, label_smoothing=0.1, reduction="sum")


def capped(scores: Tensor, targets: Tensor) -> Tensor:
    scores = torch.tanh(scores / 3.0) * 3.0
    return nn.CrossEntropyLoss(reduction="none")(scores.reshape(-1, CLASSES), targets.reshape(-1)).mean()


LOSSES = [plain, shifted, transposed, capped]


def run(captured: Captured, model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of a graph and its parameters' gradients, op by op."""
    graph, memory = captured.graph, dict[int, Any](captured.constants)
    torch.manual_seed(0)
    for value in graph.values:
        if value.kind == "input":
            memory[value.id] = inputs[int(value.path)]
        if value.kind == "tangent":
            memory[value.id] = torch.ones(value.shape, dtype=getattr(torch, value.dtype))
        if value.kind == "parameter":
            memory[value.id] = model.get_parameter(value.path).detach()
        if value.kind == "buffer":
            memory[value.id] = model.get_buffer(value.path).clone()
    for op in graph.ops:
        args, kwargs = map_refs((op.args, dict(op.kwargs)), memory.__getitem__)
        result = overload(op.target)(*args, **kwargs)
        results = result if op.returns_tuple else (result,)
        memory.update((value, one) for value, one in zip(op.outputs, results, strict=False) if value is not None)
    gradients = {graph.values[of].path: memory[gradient] for of, gradient in graph.gradients}
    return [memory[value] for value in graph.outputs], gradients


def in_eager(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    output = model(*inputs)
    output.backward(torch.ones_like(output))
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return [output.detach()], found


def assert_near_float64(model: nn.Module, inputs: tuple[Tensor, ...], kernel: str, **options: Any) -> None:
    """The one group of the step is a kernel's, and with it the step is at most twice as far from float64's as eager
    mode, in each output and gradient."""
    before = capture(model, call_of(inputs, {}))
    assert [group.kernel for group in before.groups] == [kernel]
    assert not before.refused_groups
    assert before.groups[0].options.items() >= options.items()
    after = capture(model, call_of(inputs, {}), kernels=before.groups)
    assert any(op.target.startswith("memplan.") for op in after.graph.ops)
    assert len(after.graph.outputs) == 1
    outputs, gradients = run(after, model, inputs)
    expected, expected_gradients = in_eager(model, inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truths, true_gradients = in_eager(model.double(), wide)
    assert gradients.keys() == expected_gradients.keys()
    for mine, theirs, truth in (
        *zip(outputs, expected, truths, strict=True),
        *((gradients[name], expected_gradients[name], true_gradients[name]) for name in gradients),
    ):
        assert mine.shape == truth.shape
        error, allowed = (mine.double() - truth).norm(), 2 * (theirs.double() - truth).norm()
        assert error <= allowed + truth.norm() * torch.finfo(theirs.dtype).eps


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 16, WIDTH), torch.randint(CLASSES, (3, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize("norm", thinned(NORMS, 2), ids=lambda function: function.__name__)
def test_norms(norm: Function, dtype: torch.dtype) -> None:
    if dtype == torch.float32 or norm in (llama, t5, gemma, own):  # the others have no cast back
        assert_near_float64(Step(norm, dtype), (tokens()[0].to(dtype),), "rms_norm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize(
    ("activation", "kernel"), [(swiglu, "swiglu"), (geglu, "geglu"), *slow((by_sigmoid, "swiglu"), (halves, "swiglu"))]
)
def test_gated_activations(activation: Function, kernel: str, dtype: torch.dtype) -> None:
    assert_near_float64(Step(activation, dtype), (tokens()[0].to(dtype),), kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize("loss", thinned(LOSSES, 2), ids=lambda function: function.__name__)
def test_losses(loss: Function, dtype: torch.dtype) -> None:
    x, targets = tokens()
    assert_near_float64(Scores(loss, dtype, bias=loss is plain), (x.to(dtype), targets), "cross_entropy")


@pytest.mark.slow
def test_transformers_own_norms() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for norm in (LlamaRMSNorm(WIDTH), GemmaRMSNorm(WIDTH), T5LayerNorm(WIDTH), nn.RMSNorm(WIDTH)):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 1))
        captured = capture(model, call_of((tokens()[0],), {}))
        assert [group.kernel for group in captured.groups] == ["rms_norm"], type(norm).__name__


# -- norms of channels


class Images(nn.Module):
    """A function of a convolution's result and the module, between two convolutions."""

    def __init__(self, function: Function, dims: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        convolution, batch = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        self.first, self.last = convolution(3, 6, 3), convolution(6, 4, 3)
        self.batch, self.group, self.rectifier = batch(6), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)
        self.instance = nn.InstanceNorm2d(6) if dims == 2 else nn.InstanceNorm3d(6, affine=True)
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.function(self.first(x), self))


def batch_relu(x: Tensor, model: Images) -> Tensor:
    return model.rectifier(model.batch(x))


def batch_alone(x: Tensor, model: Images) -> Tensor:
    """As before a residual."""
    y = model.batch(x)
    y += x
    return F.relu(y)


def batch_gelu(x: Tensor, model: Images) -> Tensor:
    return F.gelu(model.batch(x))


def group_silu(x: Tensor, model: Images) -> Tensor:
    return F.silu(model.group(x))


def group_alone(x: Tensor, model: Images) -> Tensor:
    return F.group_norm(x, 3)


def instance_leaky(x: Tensor, model: Images) -> Tensor:
    return F.leaky_relu_(model.instance(x), 0.2)


def instance_dropping_nothing(x: Tensor, model: Images) -> Tensor:
    """As MONAI's ADN."""
    return F.leaky_relu(F.dropout(F.dropout3d(model.instance(x), 0.5, False), 0.0), negative_slope=0.1, inplace=True)


@pytest.mark.parametrize("dims", [2, *slow(3)])
@pytest.mark.parametrize(
    ("function", "kernel", "activation"),
    [
        (batch_relu, "batch_norm_act", "relu"),
        (batch_alone, "batch_norm_act", "none"),
        (batch_gelu, "batch_norm_act", "none"),
        (group_silu, "group_norm_act", "silu"),
        (group_alone, "group_norm_act", "none"),
        (instance_leaky, "instance_norm_act", "leaky_relu"),
        (instance_dropping_nothing, "instance_norm_act", "leaky_relu"),
    ],
)
def test_norms_of_channels(function: Function, kernel: str, activation: str, dims: int) -> None:
    torch.manual_seed(1)
    model, x = Images(function, dims), torch.randn(2, 3, *dims * (7,))
    assert_near_float64(model, (x,), kernel, activation=activation)


def test_running_statistics_are_those_of_eager_mode() -> None:
    torch.manual_seed(1)
    model, x = Images(batch_relu), torch.randn(2, 3, 7, 7)
    captured = capture(model, call_of((x,), {}), kernels=capture(model, call_of((x,), {})).groups)
    assert not any("native_batch_norm" in op.target for op in captured.graph.ops)
    graph, found = captured.graph, dict[str, Tensor]()
    changed = {new: graph.values[of].path for of, new in graph.mutations}
    watched = replace(captured, graph=replace(graph, outputs=tuple(changed)))
    found = dict(zip(changed.values(), run(watched, model, (x,))[0], strict=True))
    model(x)
    assert set(found) == {"batch.running_mean", "batch.running_var", "batch.num_batches_tracked"}
    for name, value in found.items():
        torch.testing.assert_close(value, model.get_buffer(name))


def in_evaluation(x: Tensor, model: Images) -> Tensor:
    return F.relu(F.batch_norm(x, model.batch.running_mean, model.batch.running_var))


def norm_read_too(x: Tensor, model: Images) -> Tensor:
    y = model.batch(x)
    return F.relu(y) + y


def norm_hooked(x: Tensor, model: Images) -> Tensor:
    y = model.group(x)
    y.register_hook(lambda gradient: None)
    return F.relu(y)


def norm_changed(x: Tensor, model: Images) -> Tensor:
    y, x = model.group(x), x + 0
    x.mul_(2)
    return F.relu(y) + x


def norm_without_gradient(x: Tensor, model: Images) -> Tensor:
    with torch.no_grad():
        y = model.group(x)
    return F.relu(y) + x


def norm_transposed(x: Tensor, model: Images) -> Tensor:
    return F.relu(model.instance(x.transpose(2, 3)))


def statistics_read_between(x: Tensor, model: Images) -> Tensor:
    y = model.batch(x)
    z = F.batch_norm(x, model.batch.running_mean, model.batch.running_var)
    return F.relu(y) + z


def one_element(x: Tensor, model: Images) -> Tensor:
    x = x.mean((2, 3), keepdim=True)
    return F.relu(F.group_norm(x, x.shape[1])).expand(-1, -1, 5, 5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (one_element, "group_norm_act: each mean is of one element"),
        (in_evaluation, "batch_norm_act: it has the statistics of other batches"),
        (norm_without_gradient, "group_norm_act: it has no gradient"),
        (norm_transposed, "instance_norm_act: its input and result are not contiguous or channels last alike"),
    ],
)
def test_a_norm_that_the_kernel_does_not_take_has_a_reason(function: Function, reason: str) -> None:
    captured = capture(Images(function), call_of((torch.randn(2, 3, 7, 7),), {}))
    assert not captured.groups
    assert reason in [f"{refused.kernel}: {refused.reason}" for refused in captured.refused_groups]


@pytest.mark.parametrize("function", [norm_read_too, norm_hooked, norm_changed, statistics_read_between])
def test_a_norm_whose_result_something_else_reads_is_replaced_without_the_activation(function: Function) -> None:
    (group,) = capture(Images(function), call_of((torch.randn(2, 3, 7, 7),), {})).groups
    assert group.options["activation"] == "none"
    assert len(group.calls) == 1


# -- depthwise convolutions


def filtered(**options: Any) -> Function:
    """A depthwise convolution with a filter of 3 or 1 in each dimension."""

    def convolve(x: Tensor, model: Images) -> Tensor:
        convolution: Function = F.conv2d if x.dim() == 4 else F.conv3d
        return convolution(x, model.filters, groups=6, **options)

    return convolve


class Filtered(Images):
    """With filters for each channel of the first convolution."""

    def __init__(self, function: Function, dims: int = 2, taps: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(function, dims, dtype)
        self.filters = nn.Parameter(torch.randn(6, 1, *dims * (taps,), dtype=dtype))


@pytest.mark.parametrize(
    ("options", "dims", "last"),
    [({"padding": 1}, 2, False), ({"padding": (2, 1), "stride": (1, 2)}, 2, True),
     ({"padding": "same", "dilation": 2}, 3, False), ({"padding": "valid"}, 3, True)],
    ids=str,
)  # fmt: skip
def test_depthwise_convolutions(options: dict[str, Any], dims: int, last: bool) -> None:
    torch.manual_seed(1)
    layout = (torch.channels_last if dims == 2 else torch.channels_last_3d) if last else torch.contiguous_format
    model, x = Filtered(filtered(**options), dims), torch.randn(2, 3, *dims * (8,)).contiguous(memory_format=layout)
    assert_near_float64(model, (x,), "depthwise_conv")


def several_a_channel(x: Tensor, model: Filtered) -> Tensor:
    return F.conv2d(x, torch.cat([model.filters, model.filters]), groups=6)[:, :6]


def of_one_sample(x: Tensor, model: Filtered) -> Tensor:
    return F.conv2d(x[0], model.filters, groups=6)[None]


def transposed_input(x: Tensor, model: Filtered) -> Tensor:
    return F.conv2d(x.transpose(2, 3), model.filters, groups=6)


@pytest.mark.parametrize(
    ("function", "taps", "reason"),
    [
        (several_a_channel, 3, "it has 2 filters for each channel"),
        (of_one_sample, 3, "its input has no dimension of samples"),
        (transposed_input, 3, "its input and result are not contiguous or channels last alike"),
        pytest.param(
            filtered(padding="same"),
            2,
            "it pads its sides by different numbers",
            marks=pytest.mark.filterwarnings("ignore:Using padding='same'"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_depthwise_convolution_that_the_kernel_does_not_take_has_a_reason(
    function: Function, taps: int, reason: str
) -> None:
    captured = capture(Filtered(function, taps=taps), call_of((torch.randn(2, 3, 8, 8),), {}))
    assert not captured.groups
    assert [f"{refused.kernel}: {refused.reason}" for refused in captured.refused_groups] == [
        f"depthwise_conv: {reason}"
    ]


def test_other_groups_of_channels_are_not_depthwise() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 1, 3), nn.Conv2d(1, 1, 3))
    captured = capture(model, call_of((torch.randn(2, 4, 8, 8),), {}))
    assert not captured.groups
    assert not captured.refused_groups


# -- attention


def nano_gpt(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """As nanoGPT has it."""
    scores = (x @ x.transpose(-2, -1)) * (1.0 / WIDTH**0.5)
    scores = scores.masked_fill(torch.ones(16, 16).tril() == 0, float("-inf"))
    return last(F.dropout(F.softmax(scores, dim=-1), 0.2) @ x)


def transformers_eager(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """As transformers' eager attention has it: in float32, cast before dropout."""
    scores = torch.matmul(x, x.transpose(1, 2)) * 0.2
    scores = scores + torch.full((16, 16), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
    return last(torch.matmul(F.dropout(shares, p=0.3, training=True), x))


def t5_attention(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """A bias of positions, which has a gradient."""
    scores = x @ x.transpose(1, 2) + weight[:16]
    return last(F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.5) @ x)


def without_dropout(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """A number that is finite, in rows of which nothing is left, too."""
    scores = (x @ x.transpose(1, 2) / 5).masked_fill(torch.ones(16, 16).triu() > 0, -1e4)
    return last(F.dropout(scores.softmax(-1), 0.0) @ x)


def masked_in_place(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """The group begins behind it."""
    scores = x @ x.transpose(1, 2)
    scores += weight[:16]
    return last(torch.dropout(torch.softmax(scores, 2), 0.1, True) @ x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (nano_gpt, {"p": 0.2, "scale": 1.0 / WIDTH**0.5}),
        (transformers_eager, {"p": 0.3, "scale": 0.2}),
        (t5_attention, {"p": 0.5}),
        (without_dropout, {"fill": -1e4, "scale": 0.2}),
        (masked_in_place, {"p": 0.1}),
    ],
)
def test_attention(attention: Function, options: dict[str, float], dtype: torch.dtype) -> None:
    """With the same draws as in eager mode."""
    model, x = Step(attention, dtype), tokens()[0].to(dtype)
    (group,) = capture(model, call_of((x,), {})).groups
    assert group.options == options
    assert_near_float64(model, (x,), "softmax_dropout")
    with_kernel = capture(Step(attention, dtype), call_of((x,), {}), kernels=(group,)).graph
    assert sum(op.random for op in with_kernel.ops) == ("p" in options)
    assert not any("_softmax" in op.target and op.target.startswith("aten") for op in with_kernel.ops)


@pytest.mark.parametrize(
    ("dropout", "options"),
    [
        (lambda x: torch.dropout(x, p=0.4, train=False), {}),
        (lambda x: torch.dropout(x, p=0.4, train=True), {"p": 0.4}),
        (lambda x: F.dropout(x, training=True), {"p": 0.5}),
    ],
)
def test_arguments_of_a_dropout_by_name(dropout: Function, options: dict[str, float]) -> None:
    def attention(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
        scores = (x @ x.transpose(1, 2)).masked_fill(torch.ones(16, 16).triu(1) > 0, float("-inf"))
        return last(dropout(F.softmax(scores, -1)) @ x)

    (group,) = capture(Step(attention), call_of((tokens()[0],), {})).groups
    assert group.options == options


def test_a_result_of_another_dtype_than_the_scores() -> None:
    """Within autocast on a card, or by ``dtype``."""

    def attention(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
        return (F.softmax(last(x), -1, dtype=torch.float32) * weight.float()).sum()

    model, x = Step(attention, torch.bfloat16), tokens()[0].bfloat16()
    (group,) = capture(model, call_of((x,), {})).groups
    assert group.options == {"dtype": "float32"}
    assert_near_float64(model, (x,), "softmax_dropout")


# -- losses of segmentation


class Segmentation(nn.Module):
    """A convolution to three classes, and a loss."""

    def __init__(self, loss: Function, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.head = loss, nn.Conv3d(2, 3, 1)
        self.to(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.head(x), labels)


def volumes() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 2, 4, 5, 6), torch.randint(3, (2, 1, 4, 5, 6))


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, torch.int64),
        ({"include_background": False, "batch": True, "lambda_ce": 0.3}, torch.uint8),
        ({"jaccard": True, "smooth_nr": 0.0, "smooth_dr": 1.0, "lambda_dice": 2.0}, torch.float32),
    ],
    ids=str,
)
def test_monais_dice_and_cross_entropy(options: dict[str, Any], labels: torch.dtype) -> None:
    losses = pytest.importorskip("monai.losses.dice")
    model = Segmentation(losses.DiceCELoss(softmax=True, to_onehot_y=True, **options))
    x, targets = volumes()
    assert_near_float64(model, (x, targets.to(labels)), "dice_cross_entropy")


def negative_coefficient(scores: Tensor, labels: Tensor, batch: bool = True) -> Tensor:
    """As nnU-Net has it: a Dice coefficient of the classes but the first, of sums over samples."""
    dims, shares = list(range(2, scores.dim())), torch.softmax(scores, 1)[:, 1:]
    with torch.no_grad():
        hard = torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, labels.long(), 1)[:, 1:]
        counts = hard.sum(dims)
    common, sizes = (shares * hard).sum(dims), shares.sum(dims)
    if batch:
        common, sizes, counts = common.sum(0), sizes.sum(0), counts.sum(0)
    coefficient = (2 * common + 1e-5) / torch.clip(counts + sizes + 1e-5, 1e-8)
    return 2 * F.cross_entropy(scores, labels[:, 0].long()) + 1 * -coefficient.mean()


@pytest.mark.parametrize("labels", [torch.int64, torch.float32], ids=str)
def test_nnu_nets_dice_and_cross_entropy(labels: torch.dtype) -> None:
    x, targets = volumes()
    model = Segmentation(functools.partial(negative_coefficient, batch=labels == torch.float32))
    assert_near_float64(model, (x, targets.to(labels)), "dice_cross_entropy")


def monai_beside_its_probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    """Probabilities that something else reads, too."""
    from monai.losses.dice import DiceCELoss

    shares = torch.softmax(scores, 1)
    hard = torch.zeros_like(shares).scatter_(1, labels, 1)
    return DiceCELoss(softmax=True, to_onehot_y=True)(scores, labels) + (shares * hard).mean()


def dice_of_probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    from monai.losses.dice import DiceLoss

    shares = torch.softmax(scores, 1)
    return DiceLoss(to_onehot_y=True)(shares, labels) + F.cross_entropy(scores, labels[:, 0]) + shares.var()


def test_losses_of_segmentation_that_the_kernel_does_not_take() -> None:
    losses = pytest.importorskip("monai.losses.dice")
    of = {"softmax": True, "to_onehot_y": True}
    for loss, reason in (
        (losses.DiceCELoss(weight=torch.ones(3), **of), "it weighs classes"),
        (losses.DiceCELoss(label_smoothing=0.1, **of), "it smooths labels"),
        (lambda scores, labels: losses.DiceCELoss(**of)(scores.double(), labels).float(), "it reads float64"),
        (
            lambda scores, labels: (
                losses.DiceLoss(**of)(scores, labels) + F.cross_entropy(scores, labels[:, 0], ignore_index=0)
            ),
            "its cross-entropy ignores a class that the Dice loss counts",
        ),
    ):
        captured = capture(Segmentation(loss), call_of(volumes(), {}))
        assert not captured.groups
        assert reason in [one.reason for one in captured.refused_groups if one.kernel == "dice_cross_entropy"]
    for loss in (
        losses.DiceCELoss(sigmoid=True, to_onehot_y=True),
        losses.DiceCELoss(squared_pred=True, **of),
        losses.DiceLoss(**of),
        dice_of_probabilities,
    ):
        assert not capture(Segmentation(loss), call_of(volumes(), {})).groups
    (group,) = capture(Segmentation(monai_beside_its_probabilities), call_of(volumes(), {})).groups
    assert group.kernel == "dice_cross_entropy"


# -- what no kernel replaces


def read_too(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """The normalized rows, before the weight, are read again."""
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return last(weight * h) + h.tanh()


def hooked(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    activated = F.silu(x)
    activated.register_hook(lambda gradient: None)
    return last(activated * (x * weight))


def changed(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    x, activated = x + 0, F.silu(x)
    x.mul_(2)
    return last(activated * x)


def changed_by_argument(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """``inplace`` without its name."""
    x, activated = x + 0, F.silu(x)
    F.threshold(x, 0.5, 0.0, True)
    return last(activated * x)


def changed_by_index(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    x, activated = x + 0, F.silu(x)
    x[..., 3:] = 0
    return last(activated * x)


def changed_by_out(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    buffer = torch.zeros_like(x)
    activated = F.silu(x)
    with torch.no_grad():
        torch.add(weight, 1, out=buffer[0, 0])
    return last(activated * buffer)


def without_gradient(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """The root is a constant of the derivative."""
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return last(x * root * weight)


def without_gradient_of_the_gate(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    with torch.no_grad():
        activated = F.silu(x)
    return last(activated * (x * weight))


def through_float64(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    h = x.double()
    return last((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight)


def mean_in_float64(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True, dtype=torch.float64)
    return last(x * torch.rsqrt(mean + EPS).to(x.dtype) * weight)


def widened(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    h = x.float()
    return last((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).tanh().to(x.dtype))


def unscaled(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    return last(F.rms_norm(x, (WIDTH,), None, EPS))


def shares_read_too(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    shares = F.softmax(x @ x.transpose(1, 2), -1)
    return last(F.dropout(shares, 0.2) @ x) + shares.sum()


@pytest.mark.parametrize(
    ("function", "dtype", "reason"),
    [
        (read_too, torch.float32, "rms_norm: tanh reads the result of mul inside of it, too"),
        (hooked, torch.float32, "swiglu: register_hook reads the result of silu inside of it, too"),
        (changed, torch.float32, "swiglu: a call in between changes a tensor in place"),
        (changed_by_argument, torch.float32, "swiglu: a call in between changes a tensor in place"),
        (changed_by_index, torch.float32, "swiglu: a call in between changes a tensor in place"),
        (changed_by_out, torch.float32, "swiglu: a call in between changes a tensor in place"),
        (without_gradient, torch.float32, "rms_norm: a gradient stops inside of it"),
        (without_gradient_of_the_gate, torch.float32, "swiglu: a gradient stops inside of it"),
        (through_float64, torch.float32, "rms_norm: it computes in float64"),
        (mean_in_float64, torch.float32, "rms_norm: it computes in float64"),
        (widened, torch.bfloat16, "rms_norm: its result is float32, of bfloat16"),
        (unscaled, torch.float32, "rms_norm: it has no weight"),
        (swiglu, torch.float64, "swiglu: it reads float64"),
        (shares_read_too, torch.float32, "softmax_dropout: sum reads the result of softmax inside of it, too"),
    ],
)
def test_a_group_that_a_kernel_does_not_take_has_a_reason(function: Function, dtype: torch.dtype, reason: str) -> None:
    captured = capture(Step(function, dtype), call_of((tokens()[0].to(dtype),), {}))
    assert not captured.groups
    assert list(map(str, captured.refused_groups)) == [reason]


def looks_like_a_norm(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """Means of cubes, of another tensor, over another dimension, with the weight of each token, and with 8 bits."""
    a = weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS))
    b = weight * (x * torch.rsqrt(x.tanh().pow(2).mean(-1, keepdim=True) + EPS))
    c = weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS))
    d = x.detach() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))
    e = weight * (torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / x)
    f = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16) + EPS))
    return last(a + b + c + d + e + f)


def looks_gated(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """Another argument in the sigmoid, a number in the place of a tensor, a sum in the place of a product,
    a result of which a part is written."""
    written = F.silu(x)
    written[..., 3:] = 0
    return last(x * torch.sigmoid(x + 1) + F.silu(x) * 2 + (F.silu(x) + x) + written * x)


def looks_like_attention(x: Tensor, weight: Tensor, last: nn.Module) -> Tensor:
    """A softmax alone, over another dimension, of a product of tensors; dropout in evaluation."""
    a, b = F.softmax(x * 2, -1), F.dropout(F.softmax(x + weight, 1), 0.1)
    return last(a + b + F.dropout(F.softmax(x * weight, -1), 0.1, training=False))


@pytest.mark.parametrize("function", [looks_like_a_norm, looks_gated, looks_like_attention])
def test_what_only_looks_like_a_group_is_none(function: Function) -> None:
    captured = capture(Step(function), call_of((tokens()[0],), {}))
    assert not captured.groups
    assert not captured.refused_groups


def twice(scores: Tensor, targets: Tensor) -> Tensor:
    return plain(scores, targets) + scores.square().mean()


def returned(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return plain(scores, targets), scores


def weighted(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), torch.ones(CLASSES))


def scaled(scores: Tensor, targets: Tensor) -> Tensor:
    return plain(scores * 0.5, targets)


def with_probabilities(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), F.one_hot(targets.flatten(), CLASSES).float())


def some_classes(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores[..., :-1].flatten(0, 1), targets.flatten().clamp(0, CLASSES - 2))


def normalized(scores: Tensor, targets: Tensor) -> Tensor:
    return plain(F.normalize(scores, dim=-1), targets)


def masked(scores: Tensor, targets: Tensor) -> Tensor:
    """Classes that pad the vocabulary."""
    scores[..., -4:] = -torch.inf
    return plain(scores, targets.clamp(max=CLASSES - 5))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (twice, "square reads the result of linear inside of it, too"),
        (returned, "the step returns the result of linear inside of it"),
        (weighted, "it weighs classes"),
        (scaled, "its scores are scaled"),
        (with_probabilities, "its targets are no class indices"),
        (some_classes, "its scores come from getitem, not straight from a linear layer"),
        (masked, "its scores come from setitem, not straight from a linear layer"),
        (normalized, "its scores come from normalize, not straight from a linear layer"),
    ],
)
def test_a_loss_that_the_kernel_does_not_take_has_a_reason(loss: Function, reason: str) -> None:
    captured = capture(Scores(loss), call_of(tokens(), {}))
    assert not captured.groups
    assert [(refused.kernel, refused.reason) for refused in captured.refused_groups] == [("cross_entropy", reason)]


def test_classes_of_a_loss_are_the_second_dimension() -> None:
    """Here as many as tokens, so that the shapes fit."""
    torch.manual_seed(1)
    model = Scores(lambda scores, targets: F.cross_entropy(scores, targets))
    captured = capture(model, call_of((torch.randn(2, CLASSES, WIDTH), torch.randint(CLASSES, (2, CLASSES))), {}))
    assert not captured.groups
    assert [one.reason for one in captured.refused_groups] == ["its classes are not the linear layer's"]


def test_autocast_around_the_head_alone() -> None:
    class Mixed(Scores):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = self.head(self.first(x))
            return plain(scores, targets)

    captured = capture(Mixed(plain), call_of(tokens(), {}))
    assert [one.reason for one in captured.refused_groups] == ["autocast ends between the linear layer and the loss"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(Scores(plain), call_of(tokens(), {}))
    assert [group.kernel for group in captured.groups] == ["cross_entropy"]


def test_a_norm_of_another_dtype_than_its_input() -> None:
    """A weight of float32 need not widen the result of ``F.rms_norm``: versions of torch differ."""
    x, weight = torch.randn(2, WIDTH, dtype=torch.bfloat16), torch.rand(WIDTH, requires_grad=True)
    for widens in (False, True):
        log = CallLog("cpu")
        result = F.rms_norm(x, (WIDTH,), weight.to(x.dtype), EPS)
        log.call(0, F.rms_norm, (x, (WIDTH,), weight, EPS), {}, "", lambda: result.float() if widens else result)  # noqa: B023
        groups, refused = kernel_groups(log)
        assert len(groups) == (not widens)
        assert [one.reason for one in refused] == ["its result is float32, of bfloat16"] * widens


def test_groups_of_another_model_are_refused() -> None:
    """Calls that are missing, and others in their place."""
    groups = capture(Scores(shifted), call_of(tokens(), {})).groups
    for loss in (plain, twice, lambda scores, targets: shifted(scores.tanh(), targets)):
        with pytest.raises(GroupGone):
            capture(Scores(loss), call_of(tokens(), {}), kernels=groups)
