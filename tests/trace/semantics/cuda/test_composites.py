"""CUDA's parts of composite ops on CPU fakes: what autograd keeps, counted by hand, and values against torch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from environment import thinned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplan.errors import DataDependentError
from memplan.trace.semantics.cuda import autocast, composites, results
from memplan.trace.semantics.cuda.composites import Replacements, installed

A100, H100, T4 = (8, 0), (9, 0), (7, 5)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
aten = torch.ops.aten
attention: Any = functional.scaled_dot_product_attention

chosen: list[tuple[str, str]] = []


class Recorder(FakeTensorMode):
    """Fake tensors, and the names of the ops outside of others. In inference mode as a recording does it."""

    def __init__(self, replaced: Replacements | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.names: list[str] = []
        self.inside = False
        self.replaced = replaced or Replacements({}, frozenset(), set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside or func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if torch.is_inference_mode_enabled() and composite and func not in self.replaced.whole:
            with self:
                instead = self.replaced.instead.get(func, func.decompose)
                return instead(*args, **kwargs)
        self.names.append(str(func).removeprefix("aten.").removesuffix(".default"))
        self.inside = True
        instead = results.INSTEAD.get(str(func))
        if instead is not None:  # what a recording does for ops that only CUDA has
            self.inside = False
            return instead(args, kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.inside = False


@contextmanager
def card(arch: tuple[int, int] = A100, on_card: Callable[[torch.Tensor], bool] = lambda t: True) -> Iterator[Recorder]:
    chosen.clear()
    replaced: Replacements
    with installed(on_card, arch, lambda op, reason: chosen.append((op, reason))) as replaced:
        mode = Recorder(replaced)
        with mode:
            yield mode


def kept(run: Callable[[], torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and shape of each storage that autograd keeps for backward, after a backward that went well."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        alive.append(t)
        found[t.untyped_storage()._cdata] = (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()
    output.sum().backward()
    return sorted(found.values())


def kept_bytes(run: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps."""
    found: dict[int, int] = {}
    alive = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        alive.append(t)
        found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(found.values())


def leaf(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_dropout_keeps_a_bool_an_element() -> None:
    with card() as mode:
        x = leaf(4, 8, 16)
        assert kept(lambda: functional.dropout(x, 0.1)) == [("bool", (4, 8, 16))]
        assert mode.names.count("native_dropout") == mode.names.count("native_dropout_backward") == 1
        assert x.grad is not None


@pytest.mark.parametrize(
    ("p", "training", "shape"), [(0.0, True, (3,)), (1.0, True, (3,)), (0.5, False, (3,)), (0.5, True, (0,))]
)
def test_dropout_without_anything_random_is_as_ever(p: float, training: bool, shape: tuple[int, ...]) -> None:
    """native/Dropout.cpp: the one kernel is for 0 < p < 1 and tensors that are not empty."""
    with card() as mode:
        functional.dropout(torch.randn(shape), p, training)
    assert "native_dropout" not in mode.names
    assert chosen == []


@pytest.mark.parametrize("affine", [True, False])
def test_cudnns_batch_norm_reads_a_copy_of_an_input_in_no_format(affine: bool) -> None:
    """Normalization.cpp, `_batch_norm_impl_index`: without weight and bias, torch's own kernel reads any layout."""
    tokens, rows = torch.randn(8, 50, 16), torch.randn(8, 16, 50)
    images = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    weight, zeros = (torch.ones(16), torch.zeros(16)) if affine else (None, None), torch.zeros(16)
    for x, copies in ((tokens.transpose(1, 2), affine), (rows, False), (images, False)):
        with card() as mode:
            functional.batch_norm(x, zeros, zeros, *weight, training=True)
        assert mode.names.count("clone") == copies


def test_cudnns_batch_norm_keeps_the_copy() -> None:
    with card():
        x = leaf(8, 50, 16)
        weight, zeros = leaf(16), torch.zeros(16)
        saved = kept(lambda: functional.batch_norm(x.transpose(1, 2), zeros, zeros, weight, weight, training=True))
    assert ("float32", (8, 16, 50)) in saved
    assert ("float32", (8, 50, 16)) not in saved


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rms_norm_keeps_its_input_and_a_float_a_row(dtype: torch.dtype) -> None:
    with card() as mode:
        x, weight = leaf(4, 8, 16, dtype=dtype), leaf(16, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        expected = [("float32", (4, 8, 1)), (name, (16,)), (name, (4, 8, 16))]
        assert kept(lambda: functional.rms_norm(x, (16,), weight)) == sorted(expected)
        assert x.grad is not None
        assert weight.grad is not None
        assert (x.grad.dtype, weight.grad.shape) == (dtype, (16,))
    assert "_fused_rms_norm" in mode.names
    assert "_fused_rms_norm_backward" in mode.names


def test_rms_norm_of_other_dtypes_is_made_of_parts_on_cuda_too() -> None:
    with card() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so once
        functional.rms_norm(leaf(4, 16, dtype=BF16), (16,), leaf(16))
    assert "_fused_rms_norm" not in mode.names


def test_softmax_from_float16_makes_no_copy() -> None:
    with card() as mode:
        x = leaf(4, 16, dtype=F16)
        assert kept(lambda: functional.softmax(x, -1, dtype=F32)) == [("float32", (4, 16))]
        assert kept(lambda: functional.log_softmax(x, -1, dtype=F32)) == [("float32", (4, 16))]
        assert "_to_copy" not in mode.names
        functional.softmax(leaf(4, 16, dtype=BF16), -1, dtype=F32)
        assert "_to_copy" in mode.names


def heads(size: int = 64, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [leaf(2, 4, 32, size, dtype=dtype) for _ in range(3)]


def test_flash_keeps_its_operands_its_result_and_a_float_a_query() -> None:
    with card() as mode:
        q, k, v = heads()
        large = [entry for entry in kept(lambda: attention(q, k, v)) if entry[1]]
    four = [("bfloat16", (2, 4, 32, 64))] * 4
    assert [entry for entry in large if entry[0] != "uint64"] == [*four, ("float32", (2, 4, 32))]
    assert "_scaled_dot_product_flash_attention" in mode.names
    assert chosen[0] == ("scaled_dot_product_attention", chosen[0][1])
    assert chosen[0][1].startswith("flash: ")


def test_flash_pads_heads_to_a_multiple_of_8() -> None:
    with card() as mode:
        q, k, v = heads(60)
        output = attention(q, k, v)
        assert output.shape == (2, 4, 32, 60)
        found = kept(lambda: attention(q, k, v))
        assert [entry[1] for entry in found if entry[0] == "bfloat16"] == [(2, 4, 32, 64)] * 4
        mode.names.clear()
        output.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    assert mode.names.count("constant_pad_nd") == 3  # gradients, without what was added


def test_memory_efficient_attention_takes_a_mask_whose_rows_are_aligned() -> None:
    with card() as mode:
        q, k, v = (leaf(2, 4, 30, 64, dtype=BF16) for _ in range(3))
        mask = torch.ones(30, 30, dtype=torch.bool)
        found = kept(lambda: attention(q, k, v, attn_mask=mask))
        operands, sums, rows, seeds = 4 * 2 * 4 * 30 * 64 * 2, 2 * 4 * 32 * 4, 30 * 32 * 2, 2 * 8
        assert kept_bytes(lambda: attention(q, k, v, attn_mask=mask)) == operands + sums + rows + seeds
    assert "_scaled_dot_product_efficient_attention" in mode.names
    assert ("bfloat16", (2, 4, 30, 30)) in found  # the mask, broadcast: 30 rows of 32
    assert ("float32", (2, 4, 32)) in found  # one sum a query, in multiples of 32
    assert chosen[-1][1] == "memory-efficient: a mask is given, which flash attention does not take"


@pytest.mark.parametrize("needed", [True, False])
def test_sums_for_backward_only_where_gradients_are_asked_for(needed: bool) -> None:
    with card() as mode, torch.set_grad_enabled(needed):
        made: list[Any] = []
        run = mode.dispatch

        def watched(func: Any, *rest: Any) -> Any:
            result: Any = run(func, *rest)
            if "efficient_attention" in str(func):
                made.append(result[1].numel())
            return result

        mode.dispatch = watched  # pyright: ignore[reportAttributeAccessIssue]
        attention(*heads(dtype=F32))
    assert made == [2 * 4 * 32 if needed else 0]


def test_cudnn_on_hopper() -> None:
    with card(H100) as mode:
        q, k, v = heads()
        found = kept(lambda: attention(q, k, v, is_causal=True))
    assert "_scaled_dot_product_cudnn_attention" in mode.names
    assert [entry for entry in found if entry[1]] == [*[("bfloat16", (2, 4, 32, 64))] * 4, ("float32", (2, 4, 32, 1))]


def test_the_users_choice_counts() -> None:
    with card(H100) as mode:
        with sdpa_kernel(SDPBackend.MATH):
            attention(*heads())
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
            attention(*heads())
        attention(*heads())
    assert [reason.split(":")[0] for _, reason in chosen] == ["math", "flash", "cuDNN"]
    assert "bmm" in mode.names


MATH_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "a mask of bools": {"attn_mask": torch.rand(8, 8) > 0.4},
    "a mask to add": {"attn_mask": torch.rand(2, 1, 8, 8)},
    "a scale": {"scale": 0.3},
    "a negative scale": {"scale": -0.3},
    "grouped queries": {"enable_gqa": True},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", MATH_CASES, ids=str)
def test_the_math_path_is_torchs_own(case: str, dtype: torch.dtype) -> None:
    """Real tensors: values and gradients bit by bit those of torch's composite."""
    given = dict(MATH_CASES[case])
    torch.manual_seed(0)
    key_heads = 2 if given.get("enable_gqa") else 4
    q, *kv = (torch.randn(2, n, 8, 16, dtype=dtype) for n in (4, key_heads, key_heads))
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype is not torch.bool:
        given["attn_mask"] = mask.to(dtype)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(lambda *t: attention(*t, **given), q, *kv)
    order = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, **given}
    got = gradients(lambda *t: composites._math(*t, *order.values()), q, *kv)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def gradients(run: Callable[..., torch.Tensor], *operands: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    leaves = [t.clone().requires_grad_() for t in operands]
    output = run(*leaves)
    output.square().sum().backward()
    return [output.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("causal", [True, False])
def test_the_math_path_takes_what_torchs_own_takes(dtype: torch.dtype, causal: bool) -> None:
    """What was allocated on the CPU, the peak and what remains, as torch's profiler saw them."""
    given: list[Any] = [None if causal else torch.rand(64, 64) > 0.5, 0.0, causal, None, False]
    operands: Any = [torch.randn(2, 4, 64, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    mine = allocations(lambda: composites._math(*operands, *given))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = allocations(lambda: attention(*operands, *given[:3]))
    assert mine == theirs


def allocations(run: Callable[[], torch.Tensor]) -> tuple[list[int], int, int]:
    """Sizes of all allocations, the peak and what remains, in bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = run()
    assert result.requires_grad
    profiler: Any = profile.profiler
    events = list(profiler.kineto_results.experimental_event_tree())
    sizes = []
    while events:
        event = events.pop()
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
        events += event.children
    level = most = 0
    for _, size in sorted(sizes):
        level += size
        most = max(most, level)
    return sorted(size for _, size in sizes if size > 0), most, level


def test_a_call_from_c_plus_plus_is_caught() -> None:
    """Of torch's own composite: its dropout is called from C++."""
    with card() as mode:
        aten._scaled_dot_product_attention_math(*heads(), dropout_p=0.1)
    assert "native_dropout" in mode.names


def test_multihead_attention_and_its_encoder_layer_train() -> None:
    with card() as mode:
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, dtype=BF16)
        layer(torch.randn(2, 16, 64, dtype=BF16)).sum().backward()
    assert mode.names.count("_scaled_dot_product_flash_attention") == 1
    assert mode.names.count("native_dropout") == 3
    assert all(p.grad is not None for p in layer.parameters())


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(8, 16, 2),
    "LSTM of both directions": lambda: nn.LSTM(8, 16, bidirectional=True, batch_first=True),
    "LSTM with projections": lambda: nn.LSTM(8, 16, 2, proj_size=4),
    "LSTM without biases": lambda: nn.LSTM(8, 16, bias=False),
    "GRU": lambda: nn.GRU(8, 16, 2),
    "RNN": lambda: nn.RNN(8, 16, 2, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", thinned(RECURRENT, 2))
def test_recurrent_networks_are_cudnns(name: str) -> None:
    """One op forward and one backward. Kept are weights, input, output and first states; a fake's reserve is empty."""
    with card() as mode:
        model = RECURRENT[name]()
        x = leaf(5, 2, 8)
        output, states = model(x)
        states = states if isinstance(states, tuple) else (states,)
        elements = sum(t.numel() for t in (x, output, *states, *model.parameters()))
        assert kept_bytes(lambda: model(x)[0]) == 4 * elements
        output.sum().backward()
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
        assert RECURRENT[name]()(torch.randn(5, 2, 8))[0].shape == output.shape
    assert mode.names.count("_cudnn_rnn_backward") == 1
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def weight_drop() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an LSTM that computes one of its weights in each call, as AWD-LSTM does."""
    model = nn.LSTM(8, 16)
    raw = model._parameters.pop("weight_hh_l0")
    assert raw is not None

    def call(x: torch.Tensor) -> torch.Tensor:
        model.weight_hh_l0 = raw * 2  # pyright: ignore[reportAttributeAccessIssue]
        model._flat_weights = [getattr(model, name) for name in model._flat_weights_names]
        return model(x)[0]

    return call


def test_computed_weights_are_copied_into_a_buffer_at_every_call() -> None:
    """The graph keeps a copy of all weights, biases included: ``_cudnn_rnn``'s fifth result. The computed weight is
    kept besides."""
    weights = 4 * sum(weight.numel() for weight in nn.LSTM(8, 16).parameters())
    with card():
        x, flat, dropped = leaf(5, 2, 8), nn.LSTM(8, 16), weight_drop()
        assert kept_bytes(lambda: dropped(x)) - kept_bytes(lambda: flat(x)[0]) == weights


def test_autocast_makes_the_buffer_of_computed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudnn/AutocastRNN.cpp casts them into a buffer of float16: no copy in float32 besides."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with autocast.installed(lambda t: True), card():
        x, flat, dropped = leaf(5, 2, 8), nn.LSTM(8, 16), weight_drop()
        with torch.autocast("cuda", dtype=F16):
            assert kept_bytes(lambda: dropped(x)) == kept_bytes(lambda: flat(x)[0])


def test_recurrent_networks_under_autocast_run_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever autocast's dtype: cudnn/AutocastRNN.cpp."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    with autocast.installed(lambda t: True), card() as mode:
        model = nn.LSTM(8, 16)
        with torch.autocast("cuda", dtype=BF16):
            output = model(torch.randn(5, 2, 8))[0]
        assert output.dtype is F16
        output.sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
    assert mode.names.count("_cudnn_rnn_backward") == 1


def test_recurrent_networks_that_cudnn_does_not_take() -> None:
    with card(T4) as mode:
        nn.LSTM(8, 16, dtype=BF16)(torch.randn(5, 2, 8, dtype=BF16))
        assert "sm_80" in chosen[-1][1]
        with torch.backends.cudnn.flags(enabled=False):
            nn.GRU(8, 16)(torch.randn(5, 2, 8))
        assert "switched off" in chosen[-1][1]
    assert "_cudnn_rnn" not in mode.names


def test_cudnn_takes_a_packed_sequence_of_known_lengths() -> None:
    model, sizes = nn.LSTM(8, 16), torch.tensor([2, 1])
    states, weights = [torch.zeros(1, 2, 16)] * 2, list(model.parameters())
    given = (torch.randn(3, 8), sizes, states, weights, True, 1, 0.0, True, False)
    with card(), torch.backends.cudnn.flags(enabled=False), pytest.raises(DataDependentError, match="packed"):
        aten.lstm.data(*given)
    with card() as mode:
        output, state, _ = aten.lstm.data(*given)
        assert (output.shape, state.shape) == ((3, 16), (1, 2, 16))
    assert "_cudnn_rnn" in mode.names


def test_a_cell_keeps_its_gates() -> None:
    with card() as mode:
        cell = nn.LSTMCell(8, 16)
        x = leaf(3, 8)
        found = kept(lambda: cell(x)[0])
        assert all(p.grad is not None for p in cell.parameters())
    assert ("float32", (3, 64)) in found
    assert "_thnn_fused_lstm_cell" in mode.names


def test_without_gradients_and_in_inference_mode() -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        with card() as mode, context:
            x = torch.randn(2, 4, 16, 64, dtype=BF16)
            attention(x, x, x)
            functional.rms_norm(x, (64,))
            functional.dropout(x, 0.5)
        for name in ("_scaled_dot_product_flash_attention", "_fused_rms_norm", "native_dropout"):
            assert mode.names.count(name) == 1, mode.names


def test_host_tensors_keep_the_cpus_choice() -> None:
    with card(on_card=lambda t: False) as mode:
        attention(*heads())
        functional.rms_norm(leaf(4, 8), (8,)).sum().backward()
        functional.dropout(leaf(4, 8), 0.5).sum().backward()
    assert "_scaled_dot_product_flash_attention_for_cpu" in mode.names
    assert not {"_fused_rms_norm", "native_dropout"} & set(mode.names)
    assert chosen == []


def test_what_attention_refuses_is_said_by_torch() -> None:
    with card(), pytest.raises(RuntimeError, match="same dtype"):
        attention(leaf(1, 2, 3, 8), leaf(1, 2, 3, 8, dtype=BF16), leaf(1, 2, 3, 8))


def graph(value: torch.Tensor) -> str:
    assert value.grad_fn is not None
    return value.grad_fn.name()


def fail_inside() -> None:
    with card(H100):
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value
        raise ZeroDivisionError


def test_nothing_is_left_behind() -> None:
    before = torch._C._get_sdp_priority_order()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail_inside()
    assert torch._C._get_sdp_priority_order() == before
    assert graph(functional.dropout(leaf(4), 0.5)) == "MulBackward0"
    assert graph(functional.rms_norm(leaf(4), (4,))) == "MulBackward0"
    q = leaf(1, 2, 8, 8)
    output = attention(q, q, q)
    assert graph(output) == "ScaledDotProductFlashAttentionForCpuBackward0"
    torch.testing.assert_close(output, (q @ q.transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ q)
