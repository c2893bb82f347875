"""Captured graphs, run op by op, against the models themselves; refusals; what a capture leaves behind."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from environment import thinned
from models.networks import SmallGPT, SmallResNet, token_loss
from planning.agreement import difference
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memplan.errors import DataDependentError, InputError, MemplanError, RecordingError, UsageError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.loss_module import with_loss

Case = tuple[Any, ...]
CASES: dict[str, Callable[[], Case]] = {}


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a model and its arguments: (model, args, kwargs, autocast), from the right as many as are needed."""
    CASES[make.__name__] = make
    return make


class Calls(nn.Module):
    """Modules, and what to do with them."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.parts, *args, **kwargs)


def linear(out: int = 4) -> nn.Linear:
    return nn.Linear(4, out)


@case
def residual() -> Case:
    return with_loss(SmallResNet(), F.cross_entropy), (torch.randn(2, 3, 8, 8), torch.tensor([1, 4]))


@case
def transformer() -> Case:
    tokens = torch.randint(0, 40, (2, 6))
    return with_loss(SmallGPT(2), token_loss), (tokens, tokens)


@case
def transformer_in_half() -> Case:
    return *transformer(), {}, bf16


def one_weight(run: Callable[[nn.Linear, Tensor], Tensor]) -> Case:
    return Calls(lambda parts, x: run(parts[0], x).float(), nn.Linear(16, 16, bias=False)), (torch.randn(8, 16),)


@case
def casts_of_the_users_own() -> Case:
    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.linear(x.bfloat16(), layer.weight.bfloat16())
        return x

    return one_weight(run)


@case
def regions_of_autocast() -> Case:
    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                x = layer(layer(x))
        return x

    return one_weight(run)


@case
def casts_between_other_uses() -> Case:
    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        x = layer(x) @ layer.weight.bfloat16()
        with torch.autocast("cpu", enabled=False):
            x = layer(x.float())
        return layer(layer(x)) + layer.weight[0]

    return *one_weight(run), {}, bf16


@case
def no_cache_of_casts_around() -> Case:
    around = functools.partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    return *one_weight(lambda layer, x: layer(layer(layer(x)))), {}, around


@case
def dropouts() -> Case:
    layers = linear(), nn.Dropout(0.3), nn.ReLU(True), linear(), nn.Dropout(0.1, True), nn.AlphaDropout(0.2), nn.RReLU()
    return nn.Sequential(*layers), (torch.randn(5, 4),)


@case
def in_place_activations() -> Case:
    layers = linear(), nn.SiLU(True), linear(), nn.LeakyReLU(0.1, True), linear(), nn.Hardswish(True), nn.ELU(1.0, True)
    return nn.Sequential(*layers), (torch.randn(5, 4),)


@case
def channels_last() -> Case:
    layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.GroupNorm(2, 8), nn.SiLU(True)
    model: Any = nn.Sequential(*layers)
    model.to(memory_format=torch.channels_last)
    return model, (torch.randn(2, 3, 17, 17).to(memory_format=torch.channels_last),)


@case
def upsampled() -> Case:
    layers = nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(scale_factor=2)
    return nn.Sequential(*layers, nn.CircularPad2d(1)), (torch.randn(1, 3, 8, 8, requires_grad=True),)


@case
def tied() -> Case:
    embed, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embed.weight
    return Calls(lambda parts, x: parts[1](parts[0](x)), embed, head), (torch.randint(0, 20, (3, 5)),)


@case
def modules_under_two_names() -> Case:
    shared = linear()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    return Calls(lambda parts, x: parts[0]["b"](parts[0]["a"](x)), model), (torch.randn(3, 4),)


@case
def nested_outputs() -> Case:
    def run(parts: Any, x: Tensor) -> Any:
        h = parts[0](x)
        return {"a": (h, h), "n": None, "text": "x"}, [h.detach(), h.view(-1)], h.t(), x, parts[0].weight

    return Calls(run, linear()), (torch.randn(3, 4, requires_grad=True),)


@dataclasses.dataclass
class Pair:
    left: Tensor
    right: Any = None


@case
def dataclasses_in_and_out() -> Case:
    pair = Pair(torch.randn(3, 4), [torch.randn(3, 4)])
    return Calls(lambda parts, pair: Pair(parts[0](pair.left) + pair.right[0]), linear()), (pair,)


@case
def other_arguments() -> Case:
    def run(parts: Any, x: Tensor, n: int, how: str, last: Any = None, *, more: dict[str, Any]) -> Tensor:
        assert last is None
        return parts[0](x) * n if how == "times" else more["q"][0]

    return Calls(run, linear()), (torch.randn(3, 4), 3, "times"), {"more": {"q": [torch.randn(2)]}}


@case
def the_same_input_twice() -> Case:
    x = torch.randn(6, 4)
    return Calls(lambda parts, a, b, c: parts[0](a) + parts[0](b) + parts[0](c).sum(), linear()), (x, x, x[:3])


@case
def frozen_layers() -> Case:
    model = nn.Sequential(linear(), nn.ReLU(), linear(), nn.BatchNorm1d(4), linear())
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model[3].eval()
    return model, (torch.randn(3, 4),)


class Buffers(nn.Module):
    """Buffers that forward() changes in place, puts others in the place of, and reads before, between and after."""

    count: Tensor
    mean: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.kept * self.mean.add(1)
        self.count += 1
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.kept = self.kept * 0.5 + self.mean
        return h * self.mean.sigmoid() * self.kept


@case
def buffers() -> Case:
    return Buffers(), (torch.randn(3, 4),)


class Swapped(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.kept = self.kept, self.mean * 2
        return self.linear(x) * self.kept


@case
def buffers_in_each_others_place() -> Case:
    return Swapped(), (torch.randn(3, 4),)


@case
def a_changed_input() -> Case:
    def run(parts: Any, x: Tensor, y: Tensor) -> Any:
        a = x.sigmoid()
        x.mul_(2)
        x[0] = y[0]
        return a * parts[0](y) + x, x

    return Calls(run, linear()), (torch.randn(4, 4), torch.randn(4, 4))


@case
def writes_into_views() -> Case:
    def run(parts: Any, x: Tensor, at: Tensor) -> Any:
        h = parts[0](x)
        h[at] = h[at] * 2
        h[:, 0] = 0
        h[1:3].add_(1)
        return h.cumsum(0), torch.zeros(6, 4).index_add_(0, at, h[:2])

    return Calls(run, linear()), (torch.randn(6, 4), torch.tensor([1, 4]))


@case
def constants() -> Case:
    own = torch.randn(4)
    return Calls(lambda parts, x: parts[0](x) * own + torch.arange(4) + torch.tensor([1.0, 2, 3, 4]), linear()), (
        torch.randn(3, 4),
    )


@case
def values_of_constants() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        dims = torch.arange(1, x.dim()).tolist()
        return parts[0](x).mean(dims) if (torch.arange(3).diff() == 1).all() else x

    return Calls(run, linear()), (torch.randn(3, 5, 4),)


@case
def random_numbers() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        torch.rand(3)  # nobody reads it, but it moves the random stream
        return parts[0](x) * torch.rand(4) + torch.randn_like(x) + torch.bernoulli(x.sigmoid()) + torch.randperm(4)

    return Calls(run, linear()), (torch.randn(3, 4),)


@case
def checkpoints() -> Case:
    inner = nn.Sequential(linear(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))

    def run(parts: Any, x: Tensor) -> Tensor:
        x = checkpoint(parts[0], parts[1](x), use_reentrant=False)
        return checkpoint(parts[0], x, use_reentrant=True)

    return Calls(run, inner, linear()), (torch.randn(3, 4),)


@case
def a_reentrant_checkpoint_without_gradient() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            return parts[1](checkpoint(parts[0], x, use_reentrant=True))

    return Calls(run, linear(), linear()), (torch.randn(3, 4),)


@case
def compiled_parts() -> Case:
    inner = nn.Sequential(linear(), nn.ReLU())
    inner.compile(backend="eager")
    function = torch.compile(lambda x: x.sigmoid() * 2, backend="eager")
    return Calls(lambda parts, x: function(parts[1](parts[0](x))), inner, linear()), (torch.randn(3, 4),)


@case
def parametrized() -> Case:
    utils = torch.nn.utils.parametrizations
    model = nn.Sequential(utils.weight_norm(linear()), utils.spectral_norm(linear()), utils.orthogonal(linear()))
    return model, (torch.randn(3, 4),)


@case
def a_detour_without_gradient() -> Case:
    def run(parts: Any, x: Tensor) -> Any:
        h = parts[0](x)
        with torch.no_grad():
            z = parts[1](h)
        return h + z, parts[1](h.detach()), z

    return Calls(run, linear(), linear()), (torch.randn(3, 4),)


@case
def second_derivatives() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = parts[0](x).sigmoid().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return slope.pow(2).sum() + y

    return Calls(run, linear()), (torch.randn(3, 4),)


@case
def tensor_hooks() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts[0](x)
        h.register_hook(lambda gradient: gradient * 2)
        return h.sum()

    return Calls(run, linear()), (torch.randn(3, 4),)


@case
def linear_algebra() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        h = parts[0](x)
        return torch.linalg.inv(h @ h.mT + torch.eye(4)).sum() + torch.linalg.svdvals(h).sum()

    return Calls(run, linear()), (torch.randn(2, 4, 4),)


@case
def losses() -> Case:
    def run(parts: Any, x: Tensor, y: Tensor) -> Tensor:
        h = parts[0](x)
        return F.mse_loss(h, y) + F.smooth_l1_loss(h, y) + F.binary_cross_entropy(h.sigmoid(), y.sigmoid())

    return Calls(run, linear()), (torch.randn(3, 4), torch.randn(3, 4))


@case
def unused_parameters() -> Case:
    return Calls(lambda parts, x: parts[0](x), linear(), linear()), (torch.randn(3, 4),)


@case
def recurrent() -> Case:
    def run(parts: Any, x: Tensor) -> Tensor:
        return parts[1](parts[0](x)[0])[0]

    return Calls(run, nn.LSTM(4, 8, 2, dropout=0.2, bidirectional=True), nn.GRU(16, 4)), (torch.randn(5, 3, 4),)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, as it compiles
@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_a_graph_computes_what_the_model_does(name: str) -> None:
    torch.manual_seed(0)
    _, differences = difference(*CASES[name]())
    assert differences == []


def contents(model: nn.Module) -> list[Any]:
    """All that a module and what is in it hold, by identity, and the values of its tensors."""
    found: list[Any] = []
    for _, module in model.named_modules():
        for key, value in vars(module).items():
            parts = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
            found.append((key, id(value), [(name, id(part)) for name, part in parts.items()]))
    return found


@pytest.mark.parametrize("name", thinned(CASES, 9))
def test_a_capture_leaves_everything_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    model, args, *rest = CASES[name]()
    kwargs = rest[0] if rest else {}
    call = call_of(args, kwargs)
    values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *call.tensors)]
    before = contents(model), torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    capture(model, call)
    assert (contents(model), torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before
    tensors = (*model.parameters(), *model.buffers(), *call.tensors)
    assert all(torch.equal(one, other) for one, other in zip(values, tensors, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


# -- layers and lines


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = linear(), nn.Sequential(linear(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.rest(x)
        return x.sigmoid() * 2


def line_with(function: Any, text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    return f"test_capture.py:{start + next(at for at, line in enumerate(lines) if text in line)}"


def test_ops_have_the_layer_and_the_line_of_the_user() -> None:
    step = with_loss(Placed(), F.mse_loss)
    graph = capture(step, call_of((torch.randn(3, 4), torch.randn(3, 4)), {})).graph
    places = {op.target: (op.layer, (op.where or "").split("/")[-1]) for op in graph.forward_ops}
    assert places["aten.tanh.default"] == ("rest.1", line_with(Placed.forward, "self.rest"))
    assert places["aten.sigmoid.default"] == ("", line_with(Placed.forward, "sigmoid"))
    assert places["aten.mul.Tensor"] == ("", line_with(Placed.forward, "sigmoid"))
    assert {op.layer for op in graph.forward_ops if op.target == "aten.addmm.default"} == {"first", "rest.0"}
    by_layer = {op.layer: op.where or "" for op in graph.forward_ops if op.target == "aten.addmm.default"}
    assert by_layer["first"].endswith(line_with(Placed.forward, "self.first"))
    assert by_layer["rest.0"].endswith(line_with(Placed.forward, "self.rest"))


def test_a_backward_op_knows_its_forward_op() -> None:
    graph = capture(
        with_loss(SmallResNet(), F.cross_entropy), call_of((torch.randn(2, 3, 8, 8), torch.tensor([1, 4])), {})
    ).graph
    pairs = {
        "aten.convolution_backward.default": "aten.convolution.default",
        "aten.native_batch_norm_backward.default": "aten._native_batch_norm_legit_functional.default",
        "aten.threshold_backward.default": "aten.relu.default",
        "aten.max_pool2d_with_indices_backward.default": "aten.max_pool2d_with_indices.default",
    }
    seen = set[str]()
    for op in graph.backward_ops:
        if op.target in pairs:
            assert op.gradient_of is not None
            forward = graph.ops[op.gradient_of]
            assert (forward.target, forward.layer, forward.where) == (pairs[op.target], op.layer, op.where)
            seen.add(op.target)
    assert seen == set(pairs)
    norms = [op for op in graph.backward_ops if op.target == "aten.native_batch_norm_backward.default"]
    assert len({op.layer for op in norms}) == len(norms)


# -- refusals


class Item(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = linear(), function
        self.seen: Any = 0
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.inner(x))


def branches(model: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def counts(model: Any, x: Tensor) -> Tensor:
    model.seen += 1
    return x


def keeps(model: Any, x: Tensor) -> Tensor:
    model.kept.append(x)
    return x


def draws(model: Any, x: Tensor) -> Tensor:
    factor = random.random()
    return x * factor


def draws_from_numpy(model: Any, x: Tensor) -> Tensor:
    factor = float(np.random.rand())
    return x * factor


def seeds(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x


def forks(model: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(x, 0.5)


def shapes_by_values(model: Any, x: Tensor) -> Tensor:
    return x[x > 0]


@pytest.mark.parametrize(
    ("function", "kind", "said", "line"),
    [
        (branches, DataDependentError, "needs the values of a tensor", "x.sum()"),
        (shapes_by_values, DataDependentError, "needs the values of a tensor", "x[x > 0]"),
        (counts, RecordingError, "changes the attribute seen", "model.seen"),
        (keeps, RecordingError, "changes the attribute kept", "model.kept"),
        (draws, RecordingError, "draws from Python's random", "random.random()"),
        (draws_from_numpy, RecordingError, "draws from numpy.random", "np.random"),
        (seeds, RecordingError, "sets torch's random state", "torch.manual_seed"),
        (forks, RecordingError, "sets torch's random state", "fork_rng"),
    ],
)
def test_what_a_graph_would_not_do_again_is_refused_with_its_line(
    function: Any, kind: type[MemplanError], said: str, line: str
) -> None:
    model, state = Item(function), random.getstate()
    with pytest.raises(kind, match="(?s)" + said) as raised:
        capture(model, call_of((torch.randn(3, 4),), {}))
    assert line_with(function, line) in str(raised.value)
    assert (model.seen, model.kept, random.getstate()) == (0, [], state)


class Lazy(nn.Module):
    """Makes a tensor when it is first called: as an attribute, as a buffer, or in a dict."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = linear(), how
        self.mask: Any = None
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attribute":
            self.mask = torch.ones(4) if self.mask is None else self.mask
            return self.inner(x) * self.mask
        if self.how == "buffer" and not hasattr(self, "made"):
            self.register_buffer("made", torch.ones(4))
        if self.how == "dict" and 4 not in self.masks:
            self.masks[4] = torch.ones(4)
        return self.inner(x) * (self.made if self.how == "buffer" else self.masks[4])  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize(("how", "said"), [("attribute", "mask"), ("buffer", "_buffers"), ("dict", "masks")])
def test_what_the_first_call_makes_is_refused_and_is_no_matter_after_it(how: str, said: str) -> None:
    model, call = Lazy(how), call_of((torch.randn(3, 4),), {})
    with pytest.raises(RecordingError, match=f"the attribute {said}"):
        capture(model, call)
    with torch.no_grad():
        model(torch.randn(3, 4))
    capture(model, call)


def test_hooks_of_layers_are_refused_and_those_of_the_model_are_not_run() -> None:
    calls: list[str] = []
    model = nn.Sequential(linear(), nn.ReLU())
    model.register_forward_hook(lambda *_: calls.append("outer"))
    capture(model, call_of((torch.randn(3, 4),), {}))
    assert calls == []
    model[1].register_forward_hook(lambda *_: calls.append("inner"))
    with pytest.raises(UsageError, match="layer 1 has a forward hook"):
        capture(model, call_of((torch.randn(3, 4),), {}))
    assert calls == []


def test_a_parameter_that_forward_changes_is_refused() -> None:
    with pytest.raises(UsageError, match="changes a parameter"):
        capture(nn.Embedding(5, 3, max_norm=1.0), call_of((torch.tensor([1, 2]),), {}))


def test_tensors_that_are_not_plain_are_refused() -> None:
    call = call_of((torch.randn(3, 4),), {})
    with pytest.raises(InputError, match="weight is not there yet"):
        capture(nn.LazyLinear(3), call)
    with pytest.raises(InputError, match="weight is without data"):
        capture(nn.Linear(4, 4, device="meta"), call)
    with pytest.raises(InputError, match="input 0 is sparse"):
        capture(linear(), call_of((torch.eye(4).to_sparse(),), {}))


def test_a_sparse_tensor_on_the_way_is_refused() -> None:
    def product(parts: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(3).to_sparse(), parts[0](x))

    with pytest.raises(RecordingError, match=r"_to_sparse.default makes a tensor of layout torch.sparse_coo"):
        capture(Calls(product, linear()), call_of((torch.ones(3, 4),), {}))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts = linear(), [nn.Parameter(torch.ones(4, 4))]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.experts[0]


def test_what_needs_a_gradient_and_is_not_registered_is_refused() -> None:
    call = call_of((torch.randn(3, 4),), {})
    with pytest.raises(InputError, match=r"A parameter of shape \(4, 4\) needs a gradient and is not regist") as raised:
        capture(Unregistered(), call)
    assert line_with(Unregistered.forward, "experts") in str(raised.value)
    scale = torch.full((4,), 2.0, requires_grad=True)
    step = with_loss(linear(), lambda out: (out * scale).sum(), 0)
    with pytest.raises(InputError, match=r"A tensor of shape \(4,\) needs a gradient"):
        capture(step, call)
    scale = scale.detach()
    assert {graph_value.kind for graph_value in capture(step, call).graph.values} >= {"constant"}


def test_nothing_to_differentiate_is_refused() -> None:
    with pytest.raises(InputError, match="Nothing in the step needs a gradient"):
        capture(linear().requires_grad_(False), call_of((torch.randn(3, 4),), {}))
    detached = with_loss(linear(), lambda out: out.detach().sum(), 0)
    with pytest.raises(InputError, match=r"compute the loss from the model's output, without detach\(\)"):
        capture(detached, call_of((torch.randn(3, 4),), {}))


def test_functions_of_functions_are_refused() -> None:
    model = Item(lambda _, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    with pytest.raises(RecordingError, match="torch's cond takes functions"):
        capture(model, call_of((torch.randn(3, 4),), {}))


def test_a_constant_that_changes_is_refused() -> None:
    state = torch.zeros(4)

    def adds(_: Any, x: Tensor) -> Tensor:
        state.add_(1)
        return x + state

    def normalizes(_: Any, x: Tensor) -> Tensor:
        return x * F.normalize(state + 1, dim=0, out=state)  # as spectral norm of a module that the loss calls

    for changes in (adds, normalizes):
        with pytest.raises(RecordingError, match="changes a tensor in place"):
            capture(Item(changes), call_of((torch.randn(3, 4),), {}))
        assert not state.any()


# -- branches that values of inputs decide


def masked(parts: Any, x: Tensor, mask: Tensor) -> Tensor:
    return parts[0](x) if mask.all() else parts[0](x) * mask[:, None]


def test_a_branch_on_an_input_is_a_condition() -> None:
    model, x, ones = Calls(masked, linear()), torch.randn(3, 4), torch.ones(3, dtype=torch.long)
    for mask in (ones, torch.tensor([1, 0, 1])):
        captured, differences = difference(model, (x, mask))
        assert differences == []
        for other in (ones, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])):
            assert captured.takes_traced_branches(call_of((x, other), {})) == (bool(other.all()) == bool(mask.all()))
