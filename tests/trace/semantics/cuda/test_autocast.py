"""CUDA's autocast on CPU tensors: torch's own list of ops with their dtypes, and `torch.autocast("cpu")` beside it."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import DefaultDeviceType, checkpoint

import memplan
from memplan.errors import RecordingError
from memplan.trace.semantics.cuda import autocast
from memplan.trace.semantics.cuda.autocast import Autocast, installed

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def _a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording says that CUDA is there; else `torch.autocast("cuda")` turns itself off with a warning."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cuda")  # whose autocast a checkpoint restores


@pytest.fixture
def state() -> Iterator[Autocast]:
    with installed(lambda t: True) as made:
        yield made


def lists() -> Any:
    """torch/testing/_internal/autocast_test_lists.py: ops, arguments, and which dtype autocast on CUDA gives them.

    Its other import is of a package of test tools that need not be installed.
    """
    stub: Any = types.ModuleType("torch.testing._internal.common_utils")
    stub.TEST_WITH_ROCM, stub.TestCase = False, object
    name = stub.__name__
    known = sys.modules.get(name)
    sys.modules[name] = stub
    try:
        from torch.testing._internal.autocast_test_lists import AutocastTestLists

        return AutocastTestLists("cpu")
    finally:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known


torch.manual_seed(0)
LISTS = lists()
C: Any = torch._C
GROUPS: list[tuple[str, Any, torch.dtype]] = [
    ("torch_fp16", torch, F16),
    ("torch_fp32", torch, F32),
    ("torch_need_autocast_promote", torch, F32),
    ("torch_expect_builtin_promote", torch, F32),
    ("nn_fp16", C._nn, F16),
    ("nn_fp32", C._nn, F32),
    ("linalg_fp16", C._linalg, F16),
]
OPS = [(module, dtype, entry) for group, module, dtype in GROUPS for entry in getattr(LISTS, group)]
ON_CUDA_ONLY = ("cudnn_convolution", "cudnn_convolution_transpose")


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(cast(item, dtype) for item in value) if isinstance(value, tuple | list) else value


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)
    return all(equal(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, tuple | list) else a == b


@pytest.mark.parametrize(("module", "dtype", "entry"), thinned(OPS, 4), ids=[entry[0] for _, _, entry in OPS])
def test_every_op_of_torchs_list(state: Autocast, module: Any, dtype: torch.dtype, entry: Any) -> None:
    """The dtype that torch's test expects, and the values of the op run in that dtype by hand."""
    name, args, *rest = entry
    if name in ON_CUDA_ONLY:
        pytest.skip("cuDNN's own ops have no kernel on the CPU")
    kwargs = next((item for item in rest if isinstance(item, dict)), {})
    if name == "einsum":
        args = ("ij,jk->ik", *rest[0])
    expected = next((item for item in rest if isinstance(item, torch.dtype)), dtype)
    function = getattr(module, name, None) or getattr(torch.Tensor, name)
    with torch.autocast("cuda"), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"torch.chain_matmul|Using torch.cross"
        )  # deprecated, and on the list
        output = function(*args, **kwargs)
        with torch.autocast("cuda", enabled=False):
            control = function(*cast(args, dtype), **kwargs)
    first = output[0] if isinstance(output, tuple | list) else output
    if isinstance(first, torch.Tensor):
        assert first.dtype is expected
    assert equal(output, control)


@pytest.mark.parametrize("entry", LISTS.methods_fp16 + LISTS.methods_fp32, ids=lambda entry: entry[0])
def test_methods(state: Autocast, entry: Any) -> None:
    name, args = entry
    with torch.autocast("cuda"):
        output = getattr(args[0], name)(*args[1:])
    assert output.dtype is (F16 if entry in LISTS.methods_fp16 else F32)


def test_what_is_unsafe_is_refused_as_torch_refuses_it(state: Autocast) -> None:
    probability = torch.rand(3)
    with torch.autocast("cuda"):
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            functional.binary_cross_entropy(probability, probability)
        with torch.autocast("cuda", enabled=False):
            functional.binary_cross_entropy(probability, probability)


def test_every_op_that_torch_registers_is_known() -> None:
    own = {name for name in Autocast(lambda t: True).kernels() if "::" not in name}
    assert {name.partition(".")[0] for name in own} <= set(autocast._POLICIES)


def test_an_unknown_op_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(autocast._POLICIES, "mm")
    with installed(lambda t: True), torch.autocast("cuda"), pytest.raises(RecordingError, match=r"aten\.mm\.default"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


COPIES = [16, 8 * 16, 16, 16 * 16, 4, 16 * 4]  # a layer's bias before its weight, as torch's history has it


@pytest.mark.parametrize("fake", [True, False])
def test_copies_of_weights_live_as_long_as_the_context(state: Autocast, fake: bool) -> None:
    mode = FakeTensorMode() if fake else torch.enable_grad()
    with mode:
        model, x = mlp(), torch.randn(5, 8)
        with torch.autocast("cuda", dtype=BF16):
            with torch.autocast("cuda", dtype=BF16):
                model(x)
            loss = model(x).float().square().sum()
            assert [copy.numel() for copy in state.copies()] == COPIES
            assert sum(copy.nbytes for copy in state.copies()) == 2 * sum(COPIES)
            assert {copy.dtype for copy in state.copies()} == {BF16}
        assert state.copies() == []
        loss.backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
        assert all(p.grad is not None for p in model.parameters())


def step(model: nn.Module, x: torch.Tensor, device: str) -> list[torch.Tensor]:
    with torch.autocast(device, dtype=BF16):
        loss = functional.mse_loss(model(x), torch.zeros(5, 4))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def kept(run: Callable[[], Any]) -> list[tuple[str, tuple[int, ...]]]:
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        alive.append(t)
        found[t.untyped_storage()._cdata] = (str(t.dtype), tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sorted(found.values())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = mlp(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)  # pyright: ignore[reportReturnType]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_autocast_on_the_cpu(state: Autocast, name: str) -> None:
    """Products and losses stand on the CPU's lists, too: the same loss, gradients and kept tensors, bit by bit."""
    x = torch.randn(5, 8, requires_grad=True)
    mine, theirs = MODELS[name](), MODELS[name]()
    for a, b in zip(step(mine, x, "cuda"), step(theirs, x, "cpu"), strict=True):
        assert torch.equal(a, b)
        assert a.dtype is b.dtype
    assert kept(lambda: step(mine, x, "cuda")) == kept(lambda: step(theirs, x, "cpu"))
    assert state.copies() == []


def test_no_copies_where_the_cache_is_off_or_nothing_needs_a_gradient(state: Autocast) -> None:
    model, x = mlp(), torch.randn(5, 8)
    with torch.autocast("cuda", dtype=BF16, cache_enabled=False):
        model(x)
        assert state.copies() == []
    with torch.autocast("cuda", dtype=BF16):
        mlp().requires_grad_(False)(x)
        with torch.inference_mode():
            model(x)
        assert state.copies() == []
        model(x)
        torch.clear_autocast_cache()
        assert state.copies() == []


def test_a_copy_made_without_gradients_serves_where_they_are_asked_for(state: Autocast) -> None:
    model, x = mlp(), torch.randn(5, 8)
    with torch.autocast("cuda", dtype=BF16):
        with torch.no_grad():
            model(x)
        loss = model(x).sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_views_and_other_tensors_are_cast_anew(state: Autocast) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cuda"):
        torch.mm(weight.t(), weight.detach())
        part = torch.randn(8, 4)[4:].requires_grad_()
        assert part.is_leaf
        torch.mm(part, part)
        assert state.copies() == []
        torch.mm(weight, weight)
        assert len(state.copies()) == 1


def test_float64_and_host_tensors_are_left_alone() -> None:
    card = torch.randn(4, 4)
    with installed(lambda t: t is card), torch.autocast("cuda"):
        assert torch.mm(torch.randn(4, 4), torch.randn(4, 4)).dtype is F32
        assert torch.mm(torch.randn(4, 4, dtype=F64), torch.randn(4, 4, dtype=F64)).dtype is F64
        assert torch.mm(card, card).dtype is F16
        card = card.double()
        assert torch.mm(card, card).dtype is F64
        assert functional.binary_cross_entropy(torch.rand(3), torch.rand(3)).dtype is F32


def test_the_dtype_that_the_user_gives_stays(state: Autocast) -> None:
    x = torch.randn(4, dtype=F16)
    with torch.autocast("cuda"):
        assert torch.softmax(x, 0, dtype=F64).dtype is F64
        assert torch.sum(x, dtype=F16).dtype is F16
        assert torch.cumsum(x, 0).dtype is F32
        assert torch.linalg.vector_norm(x).dtype is F32
        assert torch.norm(x, 2, 0, True).shape == (1,)


def test_the_widest_of_strange_dtypes_is_refused(state: Autocast) -> None:
    """autocast_mode.h, prioritize: only float32 and what autocast gives."""
    with torch.autocast("cuda", dtype=F16), pytest.raises(RuntimeError, match="bfloat16"):
        torch.dot(torch.ones(2, dtype=BF16), torch.ones(2, dtype=BF16))


def test_torch_answers_truthfully(state: Autocast) -> None:
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", dtype=BF16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is BF16
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled("cuda")
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is F32
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is F32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        older = torch.cuda.amp.autocast()
    with older:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is F16


def test_autocast_on_the_cpu_stays_the_cpus() -> None:
    with installed(lambda t: False), torch.autocast("cpu", dtype=BF16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16
        assert torch.exp(torch.ones(2, dtype=BF16)).dtype is BF16  # on CUDA's list, not on the CPU's


def test_custom_functions_see_the_state_of_their_forward(state: Autocast) -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            a, b = ctx.saved_tensors
            product = gradient @ b.t()
            seen.append((torch.is_autocast_enabled("cuda"), product.dtype))
            return product, a.t() @ gradient

    a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cuda", dtype=BF16):
        output: Any = Product.apply(a, b)
    assert output.dtype is BF16
    output.sum().backward()
    assert seen == [(True, BF16)]


def test_backward_casts_where_the_user_calls_it_inside(state: Autocast) -> None:
    """As on CUDA: the engine takes the state along from where backward is called."""
    products: list[torch.dtype] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            products.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
            return gradient

    outputs: Any = [Watched.apply(torch.ones(2, requires_grad=True)) for _ in range(2)]
    outputs[0].sum().backward()
    with torch.autocast("cuda", dtype=BF16):
        outputs[1].sum().backward()
    assert products == [F32, BF16]


class TakenApart(TorchDispatchMode):
    """In inference mode, composite ops reach a dispatch mode whole, and a recording takes them apart."""

    def __init__(self, state: Autocast) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self.state.taking_apart(), self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is F32  # inside of an op nothing is cast
        return result


def test_ops_that_are_taken_apart_are_cast_as_elsewhere(state: Autocast) -> None:
    """`cross_entropy` is on no list, its `log_softmax` is; `tensordot` is, and what it is made of is left alone."""
    x, label = torch.randn(4, 4), torch.zeros(4, dtype=torch.long)
    functions: list[Callable[[], torch.Tensor]] = [
        lambda: functional.cross_entropy(x.half(), label),
        lambda: torch.tensordot(x, x, 1),
        lambda: torch.matmul(x, x),
        lambda: x + x,
    ]
    for function in functions:
        with torch.autocast("cuda"):
            expected = function()
            with TakenApart(state), torch.inference_mode():
                assert function().dtype is expected.dtype
        with TakenApart(state), torch.inference_mode():
            assert function().dtype is function().dtype


def test_nothing_is_left_behind() -> None:
    before = torch.set_autocast_enabled, torch.clear_autocast_cache

    def fail() -> None:
        with installed(lambda t: True), torch.autocast("cuda"):
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert (torch.set_autocast_enabled, torch.clear_autocast_cache) == before
    with torch.autocast("cuda"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is F32


def test_installed_inside_of_autocast() -> None:
    with torch.autocast("cuda"):
        with installed(lambda t: True) as state:
            weight = torch.ones(2, 2, requires_grad=True)
            assert torch.mm(weight, weight).dtype is F16
            assert len(state.copies()) == 1
        assert state.copies() == []


@torch.library.custom_op("memplan_autocast::scaled", mutates_args=())
def scaled(x: torch.Tensor, weights: list[torch.Tensor], factor: float) -> torch.Tensor:
    """An op of another library's, as torchvision's are: it wants float32."""
    assert {one.dtype for one in (x, *weights)} == {F32}
    return x * weights[0] * factor


@torch.library.custom_op("memplan_autocast::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


scaled.register_fake(lambda x, weights, factor: torch.empty_like(x))
torch.library.register_autocast("memplan_autocast::scaled", "cuda", F32)
torch.library.register_autocast("memplan_autocast::without_fake", "cuda", F32)


@pytest.mark.usefixtures("state")
def test_ops_of_other_libraries_are_cast_as_these_say() -> None:
    x, weight = torch.ones(3, dtype=F16), torch.full((3,), 2.0, dtype=F64)
    with torch.autocast("cuda"):
        assert scaled(x, [torch.full((3,), 2.0, dtype=BF16)], 1.5).dtype is F32
        with pytest.raises(AssertionError):  # float64 stays as it is
            scaled(x, [weight], 1.5)
    with pytest.raises(AssertionError):
        scaled(x, [x], 1.5)


@pytest.mark.usefixtures("state")
def test_an_op_of_another_library_that_cannot_be_seen_is_named() -> None:
    with torch.autocast("cuda"), pytest.raises(RecordingError, match=r"memplan_autocast.without_fake"):
        without_fake(torch.ones(3))


@pytest.mark.usefixtures("state")
def test_a_wrong_call_of_such_an_op_raises_what_the_op_raises() -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="size of tensor a"):
        scaled(torch.ones(3), [torch.ones(4)], 1.5)


def test_a_kernel_for_an_op_that_nobody_defined_is_passed_by() -> None:
    library = torch.library.Library("memplan_autocast", "IMPL")
    try:
        library.impl("nobody", lambda x: x, "AutocastCUDA")
        assert "memplan_autocast::nobody" in autocast.dispatch.autocast_ops()
        with installed(lambda t: True), torch.autocast("cuda"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is F16
    finally:
        library._destroy()


def test_what_a_library_casts_back_is_cast_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's kernels compute in float32, and hand on the dtype that they were given."""
    monkeypatch.setattr(autocast.dispatch, "cast_on_cuda", lambda *_: ((F32, F32, None), (F32,), (F16,)))
    with installed(lambda t: True), torch.autocast("cuda"):
        assert scaled(torch.ones(3, dtype=F16), [torch.ones(3, dtype=F16)], 1.5).dtype is F16


def test_a_step_on_a_card_counts_what_such_an_op_casts() -> None:
    def build() -> Any:
        x = torch.randn(1 << 18, device="cuda", dtype=F16)

        def step() -> None:
            with torch.autocast("cuda"):
                scaled(x, [x], 2.0)

        return step

    peak = memplan.simulate(memplan.record(build, device="h100")).peak_allocated
    assert peak == (2 + 4 + 4 + 4) << 18  # x, two copies in float32, and the result
