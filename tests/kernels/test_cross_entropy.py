"""Linear layer and cross-entropy without the logits, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from torch import Tensor, nn
from truth.cpu_allocator import allocations, measured_peak, peak_of
from truth.float64_errors import INTERPRETED, assert_as_exact, values_and_gradients

import memplan
from memplan import kernels
from memplan.errors import InputError
from memplan.kernels.cross_entropy import token_statistics, token_statistics_backward
from memplan.kernels.launch import without_data

of_memory = pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def operands(tokens: int, features: int, classes: int, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(classes, (tokens,))
    targets[torch.rand(tokens) < ignored] = -100
    hidden = torch.randn(tokens, features, dtype=torch.float64)
    weight = torch.randn(classes, features, dtype=torch.float64) / features**0.5
    return hidden, weight, targets, torch.randn(classes, dtype=torch.float64)


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, **options)


def both(with_bias: bool = True, **options: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def ours(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
        return kernels.cross_entropy(hidden, weight, targets, bias=bias if with_bias else None, **options)

    def theirs(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
        return plain(hidden, weight, targets, bias if with_bias else None, **options)

    return ours, theirs


OPTIONS = [
    {},
    {"with_bias": False, "reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1},
    {"softcap": 4.0, "reduction": "none"},
    {"softcap": 30.0, "label_smoothing": 0.3},
    {"ignore_index": 3},
]


@dtypes
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options: dict[str, Any], dtype: torch.dtype) -> None:
    hidden, weight, targets, bias = operands(19, 24, 1300)
    if "ignore_index" in options:
        targets = torch.where(targets == -100, options["ignore_index"], targets)
    assert_as_exact(*both(**options), (hidden, weight, targets, bias), dtype)


@dtypes
@pytest.mark.parametrize("sizes", [(1, 5, 7), (3, 33, 1), (2, 16, 1024), (5, 8, 1025), (9, 1030, 2061), (1, 70, 3000)])
def test_odd_sizes(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_as_exact(*both(reduction="none"), operands(*sizes, ignored=0.0), dtype, few=True)


def test_any_leading_dimensions_and_strides() -> None:
    hidden, weight, targets, bias = operands(2 * 3 * 5, 8, 40)

    def laid_out(x: Tensor, w: Tensor, t: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x = x.view(3, 5, 2, 8).permute(2, 0, 1, 3)
        strided = torch.stack([t, t], -1).view(3, 5, 2, 2).permute(2, 0, 1, 3)[..., 0]
        return x, w.t().contiguous().t(), strided, torch.stack([b, b], 1)[:, 0]

    def ours(*operands: Tensor) -> Tensor:
        x, w, t, b = laid_out(*operands)
        assert not any(operand.is_contiguous() for operand in (x, w, t, b))
        return kernels.cross_entropy(x, w, t, bias=b, reduction="none").sum()  # its gradient has strides of 0

    def theirs(*operands: Tensor) -> Tensor:
        x, w, t, b = laid_out(*operands)
        return plain(x.reshape(-1, 8), w, t.reshape(-1), b, reduction="sum")

    assert_as_exact(ours, theirs, (hidden, weight, targets, bias), torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_target_ignored(reduction: str) -> None:
    hidden, weight, targets, bias = operands(6, 8, 40)
    found, expected = (
        values_and_gradients(function, (hidden, weight, torch.full_like(targets, -100), bias))
        for function in both(reduction=reduction, label_smoothing=0.1)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0].isnan().all() == (reduction == "mean")
    assert all((gradient == 0).all() for gradient in found[1:])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens(reduction: str) -> None:
    hidden, weight, targets, bias = operands(0, 8, 40)
    found, expected = (
        values_and_gradients(function, (hidden.float(), weight.float(), targets, bias.float()))
        for function in both(reduction=reduction)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.filterwarnings(
    "ignore:divide by zero:RuntimeWarning"
)  # numpy's, of the interpreter: the log of a sum of 0
def test_classes_that_a_bias_rules_out() -> None:
    hidden, weight, targets, bias = operands(6, 8, 2500, ignored=0.0)
    bias[:1100] = float("-inf")  # the whole first part, and some
    assert_as_exact(*both(), (hidden, weight, targets % 1000 + 1200, bias), torch.float32)


def test_numeric_derivatives() -> None:
    hidden, weight, targets, bias = operands(4, 3, 1030)
    narrow = [x.requires_grad_() for x in (hidden, weight[:, :].mul(3), bias)]
    ours, _ = both(softcap=5.0, label_smoothing=0.2, reduction="none")
    assert torch.autograd.gradcheck(lambda h, w, b: ours(h, w, targets, b), narrow, fast_mode=True)


@dtypes
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, ids, bias = operands(20, 16, 1500, ignored=0.0)

    def ours(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
        return kernels.log_probs(hidden, weight, ids, bias=bias, softcap=6.0, temperature=temperature)

    def theirs(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
        logits = 6 * torch.tanh(F.linear(hidden, weight, bias) / 6) / temperature
        return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    assert_as_exact(ours, theirs, (hidden, weight, ids, bias), dtype)


def test_a_gradient_that_one_number_is_expanded_to() -> None:
    def ours(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return kernels.log_probs(hidden, weight, ids).sum()

    def theirs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return F.linear(hidden, weight).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).sum()

    assert_as_exact(ours, theirs, operands(20, 16, 1500, ignored=0.0)[:3], torch.float32)


def test_autocast_as_torch() -> None:
    hidden, weight, targets, bias = (x.float() if x.is_floating_point() else x for x in operands(30, 32, 1500))

    def cast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(*args)

        return run

    ours, theirs = both()
    found = values_and_gradients(cast(ours), (hidden, weight, targets, bias))
    expected = values_and_gradients(cast(theirs), (hidden, weight, targets, bias))
    exact = values_and_gradients(theirs, (hidden, weight, targets, bias))
    for mine, eager, truth in zip(found, expected, exact, strict=True):
        assert 0 < (mine - truth).norm() <= 2 * (eager - truth).norm()  # rounded to bfloat16, as eager


def test_a_target_out_of_range_is_nan() -> None:
    hidden, weight, targets, _ = operands(5, 8, 40, ignored=0.0)
    targets[2] = 40
    losses = kernels.cross_entropy(hidden, weight, targets, reduction="none")
    assert losses.isnan().tolist() == [False, False, True, False, False]
    assert kernels.log_probs(hidden, weight, targets).isnan().tolist() == losses.isnan().tolist()


def test_compiled_as_one_graph() -> None:
    ours, theirs = both()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_as_exact(compiled, theirs, operands(11, 8, 1100), torch.float32)


@pytest.mark.filterwarnings("ignore")  # opcheck's own
def test_the_op_is_as_torch_wants_it() -> None:
    hidden, weight, targets, bias = operands(5, 8, 40)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    torch.library.opcheck(token_statistics, (*inputs, targets, 0.0, 1.0, True))


# What is refused


def test_refused() -> None:
    hidden, weight, targets, bias = operands(6, 8, 40)
    batch = hidden.view(2, 3, 8), targets.view(2, 3)
    with pytest.raises(InputError, match=r"kernels.cross_entropy and log_probs do not run under torch.vmap"):
        torch.vmap(lambda x, t: kernels.cross_entropy(x, weight, t))(*batch)
    for wrong, message in [
        (lambda: kernels.cross_entropy(hidden, weight.t(), targets), r"weight \(8, 40\).*Expected"),
        (lambda: kernels.cross_entropy(hidden, weight, targets[1:]), r"targets \(5,\)"),
        (lambda: kernels.cross_entropy(hidden, weight, targets, bias=bias[1:]), r"bias has the shape \(39,\)"),
        (lambda: kernels.cross_entropy(hidden, weight, targets.int()), "class indices are of torch.int32"),
        (lambda: kernels.cross_entropy(hidden, weight.float(), targets), "weight of torch.float32.*autocast"),
        (lambda: kernels.cross_entropy(hidden, weight, targets, softcap=0.0), "softcap is 0.0"),
        (lambda: kernels.cross_entropy(hidden, weight, targets, label_smoothing=1.5), "label_smoothing is 1.5"),
        (lambda: kernels.cross_entropy(hidden, weight, targets, reduction="max"), "reduction is 'max'"),  # pyright: ignore[reportArgumentType]
        (lambda: kernels.log_probs(hidden, weight, targets, temperature=0.0), "temperature is 0.0"),
    ]:
        with pytest.raises(InputError, match=message):
            wrong()


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets, _ = operands(5, 8, 40)
    (gradient,) = torch.autograd.grad(
        kernels.cross_entropy(hidden.requires_grad_(), weight, targets), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match="token_statistics_backward"):
        gradient.sum().backward()


# Memory


@of_memory
@pytest.mark.parametrize("frozen", [False, True])
def test_the_logits_are_never_there(frozen: bool) -> None:
    tokens, features, classes = 512, 64, 16384
    hidden, weight, targets, _ = operands(tokens, features, classes)
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_(not frozen)
    logits = tokens * classes * 4

    def run(loss: Callable[..., Tensor]) -> int:
        hidden.grad = weight.grad = None
        return peak_of(allocations(lambda: loss(hidden, weight, targets).backward()))

    part = tokens * 1024 * 4
    gradients = hidden.nbytes + (0 if frozen else weight.nbytes)
    assert run(plain) >= 2 * logits
    assert run(kernels.cross_entropy) <= gradients + 5 * part < logits / 2  # the plain form's temporaries are 5 parts


def step_of(dtype: torch.dtype, autocast: bool, frozen: bool) -> Callable[[], Callable[[], None]]:
    """A small language model's training step, whose loss is ours."""

    def build() -> Callable[[], None]:
        embed, body, head = nn.Embedding(5000, 64).to(dtype), nn.Linear(64, 64).to(dtype), nn.Linear(64, 5000).to(dtype)
        head.requires_grad_(not frozen)
        model = nn.Sequential(embed, body, head)
        tokens = torch.randint(5000, (4, 75))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                hidden = torch.relu(body(embed(tokens)))
                loss = kernels.cross_entropy(
                    hidden, head.weight, tokens, bias=head.bias, softcap=30.0, label_smoothing=0.1
                )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@of_memory
@pytest.mark.parametrize("frozen", [False, *slow(True)])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, True), *slow((torch.float32, False), (torch.bfloat16, False))]
)
def test_a_recorded_step_takes_what_is_measured(dtype: torch.dtype, autocast: bool, frozen: bool) -> None:
    build = step_of(dtype, autocast, frozen)
    predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
    assert predicted == measured_peak(build)


@of_memory
def test_on_a_card_a_part_of_the_logits_is_all_that_is_added() -> None:
    """By hand, with one token a row and the classes in three parts."""
    tokens, features, classes = 4096, 256, 3072
    hidden_bytes, weight_bytes, state_bytes = tokens * features * 2, classes * features * 2, tokens * 4

    def build() -> Callable[[], None]:
        hidden = torch.randn(tokens, features, dtype=torch.bfloat16)
        weight = torch.randn(classes, features, dtype=torch.bfloat16)
        targets = torch.zeros(tokens, dtype=torch.int64)

        def step() -> None:
            kernels.log_probs(hidden, weight, targets)

        return step

    trace = memplan.record(build, device="h100", steps=1)
    step = memplan.simulate(trace).steps[0]
    held = hidden_bytes + weight_bytes + tokens * 8
    cublas = 32 << 20
    # lse, picked; the shifted targets of a part; its logits
    assert step.peak_allocated - held - cublas == 2 * state_bytes + tokens * 8 + tokens * 1024 * 2


@of_memory
@pytest.mark.parametrize(("dtype", "products"), [(torch.float32, 0), (torch.bfloat16, 3)])
def test_on_a_card_the_backward_pass_allocates_the_gradient_of_hidden_once(dtype: torch.dtype, products: int) -> None:
    """In half precision also a product for each of three parts of the classes, and a sum in float32."""
    tokens, features, classes = 512, 256, 3072
    hidden, weight = torch.zeros(tokens, features, dtype=dtype), torch.zeros(classes, features, dtype=dtype)
    ids, lse = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens)

    def run() -> None:
        with without_data("cuda"):
            token_statistics_backward(
                lse, lse, lse[:0], hidden, weight, None, ids, lse, softcap=0.0, scale=1.0, wanted=[True, True, False]
            )

    sizes = allocations(run)
    assert sizes.count(hidden.nbytes) == 1 + products
    assert sizes.count(weight.nbytes) == 1
    assert max(size for size in sizes if size != weight.nbytes) == tokens * 1024 * dtype.itemsize
    assert (2 * hidden.nbytes in sizes) == bool(products)  # the sum
