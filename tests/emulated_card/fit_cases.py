"""`memplan.fit` and `memplan.plan` of modules on a card, the emulated one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from verification.fitting import quick

from memplan._bytes import ALLOCATOR_BLOCK, round_to_blocks
from memplan.errors import BudgetError, DeviceError, VerificationError
from memplan.planning.cost import op_timing
from memplan.planning.levers import encode
from memplan.planning.ops import pieces
from memplan.rewriting.engine import Engine
from memplan.simulation.timeline import AllocatorEvent
from memplan.verification.measurement import free_memory

WIDTH, TOKENS, WORDS = 64, 128, 100
KEPT_BUT = 0.15
"""Share that dropout drops: of this, the scale is another number where it is computed in float32."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(0.15),
        )  # whose scale is another number where 1 - p is rounded to float32

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.parts(self.first(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = torch.softmax(q @ k.transpose(2, 3) * 0.25, -1) @ v  # which kernel torch would choose does not matter
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(self.drop(F.gelu(self.up(self.second(x)))))


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS)).cuda()


def tokens_loss(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def words() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (16, TOKENS), device="cuda"), torch.randint(WORDS, (16, TOKENS), device="cuda")


@pytest.fixture(autouse=True)
def _all_ops_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(op_timing, "CARD_LIMIT", 60.0)


@functools.cache
def bounds(**options: Any) -> tuple[int, int]:
    """The peaks of the smallest plan of the language model, and of its step without one."""
    x, y = words()
    plan = quick.plan(language_model(), x, targets=y, loss=tokens_loss, budget="20 GiB", **options)
    return plan.floor, plan.eager_peak


def between(share: float, **options: Any) -> int:
    """A budget between the two."""
    floor, eager_peak = bounds(**options)
    assert floor < eager_peak
    return floor + int(share * (eager_peak - floor))


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def peak_of_requests(log: Iterable[AllocatorEvent]) -> int:
    """The most bytes of an allocator's log, in blocks of 512 bytes as the emulated card counts: without what blocks
    have unsplit, up to 1 MiB each, which depends on what was freed before the step."""
    signs = {"alloc": 1, "free_completed": -1}
    return max(itertools.accumulate(signs.get(event.action, 0) * round_to_blocks(event.size) for event in log))


def test_a_step_fits_in_less_with_the_same_bits_and_takes_what_was_predicted() -> None:
    budget, model, (x, y) = between(0.4), language_model(), words()
    expected = gradients(model, lambda: tokens_loss(model(x), y))
    model.zero_grad(set_to_none=True)
    before, numbers = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    fitted = quick.fit(model, x, targets=y, loss=tokens_loss, budget=budget, pairs=1)
    proof = fitted.proof
    assert fitted.changed
    assert proof.same
    assert proof.grade == "exact"
    assert proof.peak <= budget
    assert fitted.plan.device == "rtx4090"
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(one.grad is None for one in model.parameters())
    assert fitted.loss is not None
    loss = fitted.loss
    found = gradients(model, lambda: loss(x, y))
    assert found.keys() == expected.keys()
    assert all(one.device.type == "cuda" and torch.equal(one, expected[name]) for name, one in found.items())

    # what is allocated is what was predicted
    model.zero_grad(set_to_none=True)
    own = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in (*model.parameters(), x, y))
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - own
    loss(x, y).backward()
    taken = torch.cuda.max_memory_allocated() - others
    libraries = fitted.plan.resident["workspace"]  # of which an emulated card has none
    assert libraries == 8_519_680  # both passes run in one thread; as torch documents it for this card
    assert peak_of_requests(fitted.plan.predicted.log) - libraries == taken


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_the_optimizer_is_part_of_it(early: bool) -> None:
    model, (x, y) = language_model(), words()
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "early": early}
    budget = between(0.5, **options)
    fitted = quick.fit(model, x, targets=y, loss=tokens_loss, budget=budget, pairs=0, **options)
    assert fitted.proof.same
    assert fitted.proof.peak <= budget
    trained = sum(-(-one.numel() * 4 // 512) * 512 for one in model.parameters())
    assert fitted.plan.resident["optimizer_state"] == 2 * trained  # what counts the steps is in host memory
    fitted.undo()


@pytest.mark.slow
def test_values_wait_in_host_memory_where_that_is_cheaper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(512, 512), nn.Tanh()))).cuda()
    x = torch.randn(8192, 512, device="cuda")
    budget = quick.plan(model, x, budget="20 GiB").floor
    fitted = quick.fit(model, x, budget=budget, pairs=0)
    # the emulated card computes as slowly as this processor, and copies as fast as a real one's link
    assert fitted.plan.count("offload") > 0
    assert fitted.proof.same
    assert fitted.proof.peak <= budget


@pytest.mark.slow
def test_lower_precision_is_held_against_float64() -> None:
    model, (x, y) = language_model(), words()
    budget = between(0.3)
    fitted = quick.fit(model, x, targets=y, loss=tokens_loss, budget=budget, pairs=0, allow="lossy")
    assert fitted.proof.same
    assert fitted.proof.peak <= budget


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_with_one_that_is_not() -> None:
    model, (x, y) = language_model(), words()
    with pytest.raises(BudgetError) as error:
        quick.fit(model, x, targets=y, loss=tokens_loss, budget="18 MiB", pairs=0)
    least = error.value.smallest_budget
    fitted = quick.fit(model, x, targets=y, loss=tokens_loss, budget=least, pairs=0)
    assert fitted.proof.peak <= least


@pytest.mark.slow
def test_a_step_that_fits_stays_as_it_is() -> None:
    model, (x, y) = language_model(), words()
    fitted = quick.fit(model, x, targets=y, loss=tokens_loss, budget="1 GiB", pairs=0)
    assert not fitted.changed
    assert fitted.proof.peak == fitted.proof.reference_peak


_CALLS = itertools.count()


@torch.library.custom_op("memplan_cases::as_threads_come", mutates_args=())
def as_threads_come(x: Tensor) -> Tensor:
    """A sum whose last bits hang on what comes first."""
    return x * (1 + (next(_CALLS) % 3) * 2**-22)


@as_threads_come.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


as_threads_come.register_autograd(lambda _, gradient: as_threads_come(gradient))


class Chance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(as_threads_come(x)))
        return x


@pytest.mark.slow
def test_a_step_that_differs_from_run_to_run_is_held_against_rounding() -> None:
    torch.manual_seed(0)
    model, x = Chance().cuda(), torch.randn(512, 64, device="cuda")
    plan = quick.plan(model, x, budget="20 GiB")
    budget = (plan.floor + plan.eager_peak) // 2
    fitted = quick.fit(model, x, budget=budget, pairs=0)
    assert fitted.proof.same
    assert fitted.proof.grade == "reordered"


_SEEN = set[bool]()


class Norms(nn.Module):
    """Notes whether cuDNN is on while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        _SEEN.add(torch.backends.cudnn.enabled)
        for norm in self.norms:
            x = torch.tanh(norm(x))
        return x


@pytest.mark.slow
def test_running_statistics_are_updated_once() -> None:
    model, x = Norms().cuda(), torch.randn(65536, 64, device="cuda")
    plan = quick.plan(model, x, budget="20 GiB")
    fitted = quick.fit(model, x, budget=(plan.floor + plan.eager_peak) // 2, pairs=0)
    assert fitted.changed
    assert False in _SEEN  # while it was captured: cuDNN's norm would change them unseen
    assert torch.backends.cudnn.enabled
    assert fitted.proof.same
    assert fitted.proof.buffers.tensors > 0
    statistics = dict(model.named_buffers())
    before = statistics["norms.0.running_mean"].clone()
    model(x).sum().backward()
    assert torch.allclose(statistics["norms.0.running_mean"], 0.9 * before + 0.1 * x.mean(0))
    assert int(statistics["norms.0.num_batches_tracked"]) == 1


def test_pieces_on_a_card_hold_no_more_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    piece, ops = 1 << 20, torch.ops.memplan
    monkeypatch.setattr(pieces, "CARD_PIECE", piece)
    monkeypatch.setattr(pieces, "CARD_LEAST", piece >> 4)
    x, gradient = torch.randn(2, piece + 5, device="cuda"), torch.randn(2, piece + 5, device="cuda")
    bits, half = ops.pack_bits(x, "sign"), x.bfloat16()
    flags = ops.unpack_bits(bits, x.shape, x.stride())
    some = pieces.quantized_elements_per_piece(x.numel(), "cuda")
    packing, direct = (
        encode._flag_bytes(piece, "cuda"),
        {one.target: one.temporary_pieces for one in encode.BITS_READERS.values()},
    )
    read = {
        name: piece * (1 + 4 * direct[f"memplan.{name}_bits"])
        for name in ("threshold_backward", "native_dropout_backward")
    }
    said: dict[Callable[[], Any], int] = {
        lambda: ops.pack_bits(x, "sign"): packing,
        lambda: ops.pack_bits(x, "positive"): packing,
        lambda: ops.pack_bits(flags, "bits"): packing,
        lambda: ops.unpack_bits(bits, x.shape, x.stride()): piece,
        lambda: ops.threshold_backward_bits(gradient, bits, 0): read["threshold_backward"],
        lambda: ops.native_dropout_backward_bits_(gradient, bits, 1.1): read["native_dropout_backward"],
        lambda: ops.quantize(x, True): 5 * some,
        lambda: ops.quantize(half, False): 13 * some,
        lambda: ops.hardswish_backward_(gradient, x): 4 * pieces.elements_per_piece(x.numel(), "cuda"),
    }
    held = [op_timing.workspace_on("cuda:0", call) for call in said]
    assert all(0 < one <= most + 8 * ALLOCATOR_BLOCK for one, most in zip(held, said.values(), strict=True)), held


class OtherNorms(nn.Module):
    """Rounds differently where cuDNN is on, as its norms do, also in the pass that a checkpoint runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.norm, layer(x), use_reentrant=False)
        return x

    def norm(self, x: Tensor) -> Tensor:
        """What differs by much more than rounding."""
        return torch.tanh(x * (1.25 if torch.backends.cudnn.enabled else 1.0))


@pytest.mark.slow
def test_norms_that_are_torchs_own_in_the_plan_alone_are_proven_beside_torchs_own() -> None:
    torch.manual_seed(0)
    model, x = OtherNorms().cuda(), torch.randn(8192, 64, device="cuda")
    plan = quick.plan(model, x, budget="20 GiB")
    fitted = quick.fit(model, x, budget=(plan.floor + plan.eager_peak) // 2, pairs=0)
    proof = fitted.proof
    assert proof.same
    assert proof.grade == "exact"
    assert proof.torch_kernels
    assert "torch's own norms and recurrent layers in place of cuDNN's" in str(proof)
    assert proof.gradients.tensors == 3 * 8  # every step was compared


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("made", ["OtherNorms", "Cancelling"])
def test_a_wrong_plan_is_refused_where_bits_are_not_eager_modes(
    made: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that a plan is held against has to run without it."""
    torch.manual_seed(0)
    model, x = globals()[made]().cuda(), torch.randn(8192, 64, device="cuda")
    plan = quick.plan(model, x, budget="20 GiB")
    run = Engine.run

    def wrong(engine: Engine, *args: Any) -> Any:
        return run(engine, *args) * (1 + 0.06 * share)

    monkeypatch.setattr(Engine, "run", wrong)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(VerificationError, match="NOT the same: the output is"):
        quick.fit(model, x, budget=(plan.floor + plan.eager_peak) // 2, pairs=0)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


@torch.library.custom_op("memplan_cases::product", mutates_args=())
def product(x: Tensor, factor: float) -> Tensor:
    """A product that TF32 rounds, and whose last bits are others in every call, as where threads add in any order."""
    chance = (torch.arange(x.numel()) * 7919 + next(_CALLS) * 104729) % 5 - 2
    made = x * factor * (1 + chance.view_as(x).to(x) * 2**-23)
    if not torch.backends.cudnn.allow_tf32:
        return made
    return (made.view(torch.int32) // 2**13 * 2**13).view(torch.float32)


product.register_fake(lambda x, factor: torch.empty_like(x))
product.register_autograd(
    lambda ctx, gradient: (product(gradient, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


class Cancelling(nn.Module):
    """Takes away almost all of a product, so that TF32 is off by more than what remains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = F.gelu(torch.tanh(400 * (product(h, 1.0005) - h)))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("fits", [False, True])
def test_what_tf32_would_hide_is_compared_without(fits: bool) -> None:
    torch.manual_seed(0)
    model, x = Cancelling().cuda(), torch.randn(8192, 64, device="cuda")
    plan = quick.plan(model, x, budget="20 GiB")
    assert plan.floor < plan.eager_peak
    fitted = quick.fit(model, x, budget="1 GiB" if fits else (plan.floor + plan.eager_peak) // 2, pairs=0)
    assert fitted.changed != fits
    proof = fitted.proof
    assert proof.same
    assert proof.grade == "reordered"
    assert proof.truth == "float64"
    assert proof.full_float32
    assert "compared with TF32 off" in str(proof)
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.slow
def test_what_there_is_no_room_for_is_proven_with_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = language_model(), words()
    budget = between(0.5)
    monkeypatch.setattr(free_memory, "available", lambda _: budget)
    fitted = quick.fit(model, x, targets=y, loss=tokens_loss, budget=budget, pairs=0)
    assert fitted.proof.same
    assert fitted.proof.cut is not None
    assert fitted.proof.cut.samples < 16


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], int]]:
    """Gives the card so many bytes more than are allocated, and returns what says the most that was allocated since."""
    most, reset = [0], torch.cuda.reset_peak_memory_stats

    def seen() -> int:
        most[0] = max(most[0], torch.cuda.max_memory_allocated())
        return most[0]

    def resetting(*args: Any) -> None:
        seen()
        reset(*args)

    def of(more: int) -> Callable[[], int]:
        limit = torch.cuda.memory_allocated() + more
        resetting()
        most[0] = 0
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resetting)
        monkeypatch.setattr(free_memory, "available", lambda _: limit - torch.cuda.memory_allocated())
        return lambda: seen() - (limit - more)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.5, 2.2, 8.0])
def test_a_proof_takes_no_more_than_there_is(share: float, capacity: Callable[[int], Callable[[], int]]) -> None:
    """Bits differ, so that further runs beside the first two say whether they may: one more, and then in float64."""
    torch.manual_seed(0)
    model, x = Cancelling().cuda(), torch.randn(32768, 64, device="cuda")
    plan = quick.plan(model, x, budget="20 GiB")
    room = int(share * plan.eager_peak)
    taken = capacity(room)
    fitted = quick.fit(model, x, budget=(plan.floor + plan.eager_peak) // 2, pairs=0)
    assert fitted.proof.same
    assert taken() <= room
    assert (fitted.proof.cut is None) == (share > 7)  # then there is room for all
    assert fitted.proof.cut is None or fitted.proof.cut.samples < 32768


def test_a_step_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].cuda()
    with pytest.raises(DeviceError, match=r"0\.weight on cpu and 1\.weight on cuda:0"):
        quick.fit(model, torch.randn(2, 4), budget="1 MiB")
    with pytest.raises(DeviceError, match="input 0 on cuda:0"):
        quick.fit(nn.Linear(4, 4), torch.randn(2, 4, device="cuda"), budget="1 MiB")
