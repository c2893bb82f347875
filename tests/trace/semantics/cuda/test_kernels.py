"""Temporaries of CUDA kernels, against published peaks of an A100 and sums worked by hand from torch's sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.trace.semantics.cuda import kernels, results
from memplan.trace.semantics.cuda.arch import A100, Arch
from memplan.trace.semantics.cuda.attention_kernels import flash_splits
from memplan.trace.semantics.kinds import Temporary

MIB = 1 << 20
T4, H100, RTX4090 = Arch((7, 5), 40), Arch((9, 0), 132), Arch((8, 9), 128)
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fake() -> Any:
    with FakeTensorMode() as mode:
        yield mode


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def taken(op: Any, *args: Any, result: Any = None, arch: Arch = A100, **kwargs: Any) -> tuple[int, ...]:
    found = temporaries(op, *args, result=result, arch=arch, **kwargs)
    return tuple(size.bytes if isinstance(size, Temporary) else size for size in found)


def temporaries(
    op: Any, *args: Any, result: Any = None, arch: Arch = A100, **kwargs: Any
) -> tuple[int | Temporary, ...]:
    formula = kernels.FORMULAS.get(str(op))
    return () if formula is None else formula(args, kwargs, result, arch)


def rounded(sizes: tuple[int, ...]) -> int:
    """Bytes as the caching allocator hands them out."""
    return sum(-(-size // 512) * 512 for size in sizes)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "mib"),
    [
        # "Hugging Face" less "Liger" in Liger-Kernel's benchmark/embedding_memory, A100, 16,384 indices: the
        # second one's backward takes nothing of its own.
        (1024, 4096, torch.bfloat16, 9316.130859 - 9274.125),
        (2048, 4096, torch.bfloat16, 9428.154297 - 9370.125),
        (8192, 4096, torch.bfloat16, 10100.294922 - 9946.125),
        (16384, 4096, torch.bfloat16, 10996.482422 - 10714.125),
        (65536, 4096, torch.bfloat16, 15604.482422 - 15322.125),
        (2048, 768, torch.float32, 130.759375 - 119.525),
        (32768, 768, torch.float32, 524.0875 - 470.525),
        (131072, 768, torch.float32, 1647.2875 - 1593.725),
    ],
)
def test_embedding_backward_takes_what_was_published(rows: int, width: int, dtype: torch.dtype, mib: float) -> None:
    found = temporaries(
        aten.embedding_dense_backward.default,
        empty(32, 512, width, dtype=dtype),
        empty(32, 512, dtype=torch.int64),
        rows,
        -1,
        False,
    )
    # what the sort took is given back before the result is made
    sizes = [one.bytes if isinstance(one, Temporary) else one for one in found if getattr(one, "until", None) is None]
    assert rounded(tuple(sizes)) == pytest.approx(mib * MIB, abs=0.001 * MIB)


def test_few_indices_need_no_sort() -> None:
    op = aten.embedding_dense_backward.default
    gradient, indices = empty(4, 768, 64), empty(4, 768, dtype=torch.int64)
    assert taken(op, gradient, indices, 100, -1, False) == ()
    assert len(taken(op, gradient, indices, 100, -1, True)) == 12
    assert taken(op, gradient.transpose(0, 1), indices, 100, -1, False) == (4 * 768 * 64 * 4,)


def test_the_published_cross_entropy_leaves_no_room_for_temporaries() -> None:
    # 16384 x 4096 in float32 on an A100, from the second step on: 1280.126 MiB. Live at its worst moment are five
    # of 256 MiB: logits, their gradient held, log-softmax, its gradient, the new gradient; and the targets.
    logits, target = empty(16384, 4096), empty(16384, dtype=torch.int64)
    scalar = empty()
    taken_by = [
        taken(aten._log_softmax.default, logits, 1, False, result=logits),
        taken(aten.nll_loss_forward.default, logits, target, None, 1, -100, result=(scalar, scalar)),
        taken(aten.nll_loss_backward.default, scalar, logits, target, None, 1, -100, scalar, result=logits),
        taken(aten._log_softmax_backward_data.default, logits, logits, 1, torch.float32, result=logits),
        taken(aten.add_.Tensor, logits, logits, result=logits),
    ]
    assert taken_by == [()] * 5
    small = 16384 * 8 + 3 * 512
    assert (5 * 16384 * 4096 * 4 + small) / MIB == pytest.approx(1280.126, abs=0.001)


def test_softmax_backward_multiplies_first() -> None:
    scores = empty(4, 16, 100, 100, dtype=torch.bfloat16)
    assert taken(aten._softmax_backward_data.default, scores, scores, -1, torch.bfloat16) == (4 * 16 * 100 * 100 * 2,)
    turned = scores.transpose(-1, -2)
    assert taken(aten._softmax.default, turned, -1, False) == (4 * 16 * 100 * 100 * 2,)


def layer_norm(rows: int, columns: int, arch: Arch = A100, mask: tuple[bool, ...] = (True,) * 3) -> tuple[int, ...]:
    x, statistic, weight = empty(rows, columns, dtype=torch.bfloat16), empty(rows, 1), empty(columns)
    args = (x, x, [columns], statistic, statistic, weight, weight, list(mask))
    return taken(aten.native_layer_norm_backward.default, *args, arch=arch)


def test_layer_norm_sums_in_two_passes_only_where_rows_are_many_and_columns_few() -> None:
    assert layer_norm(4096, 16384) == ()
    assert layer_norm(65536, 768) == ()
    # 24 blocks of columns, so that 32768 // 24 blocks of rows are launched; a float32 weight.
    assert layer_norm(131072, 768) == (1365 * 768 * 4,) * 2
    assert layer_norm(131072, 768, mask=(True, True, False)) == (1365 * 768 * 4,)
    assert layer_norm(131072, 1728) == ()
    assert layer_norm(131072, 1728, H100) == (606 * 1728 * 4,) * 2
    assert layer_norm(70016, 32) == (2188 * 32 * 4,) * 2


def test_rms_norm_is_layer_norm_without_a_bias() -> None:
    x, weight = empty(131072, 768), empty(768)
    args = (x.t().contiguous().t(), x, [768], empty(131072, 1), weight, [True, True])
    sizes = taken(aten._fused_rms_norm_backward.default, *args)
    assert sizes == (131072 * 768 * 4, 1365 * 768 * 4)


def test_group_norm_keeps_sums_a_channel() -> None:
    x, weight, statistic = empty(8, 64, 32, 32, dtype=torch.bfloat16), empty(64), empty(8, 4)
    assert taken(aten.native_group_norm.default, x, weight, weight, 8, 64, 1024, 4, 1e-5) == (8 * 64 * 4,) * 2
    args = (x, x, statistic, statistic, weight, 8, 64, 1024, 4, [True] * 3)
    assert taken(aten.native_group_norm_backward.default, *args) == ((8 * 64 * 4,) * 3 + (8 * 4 * 4,) * 2)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    # Tiles of 32 channels and 16 rows of threads, 16 rows a thread: 256 rows a block, at most 128, at least 8.
    [((32, 256, 28, 28), 98), ((32, 64, 56, 56), 128), ((4, 2048, 7, 7), 1), ((64, 512, 8, 8), 16)],
)
def test_batch_norm_in_channels_last_stages_its_sums(shape: tuple[int, ...], blocks: int) -> None:
    x = empty(*shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    per, channels = empty(shape[1]), shape[1]
    staged = (4 * channels * blocks * 4,) if blocks > 1 else ()
    assert taken(aten.native_batch_norm.default, x, per, per, per, per, True, 0.1, 1e-5) == staged
    assert taken(aten.native_batch_norm.default, x.contiguous(), per, per, per, per, True, 0.1, 1e-5) == ()
    assert taken(aten.native_batch_norm.default, x, per, per, per, per, False, 0.1, 1e-5) == ()
    args = (per, per, per, per, per, True, 1e-5, [True] * 3)
    backward = aten.native_batch_norm_backward.default
    staged = (2 * channels * blocks * 4,) if blocks > 1 else ()
    assert taken(backward, x, x, *args) == (channels * 4,) * 2 + staged
    # Flattened to (batch, channels, rest), both formats are views; a part of an image is not.
    assert taken(backward, x, x.contiguous(), *args) == ()
    part = empty(*shape[:3], 2 * shape[3], dtype=torch.bfloat16)[..., ::2]
    sliced = empty(*shape[:2], 2 * shape[2], shape[3] + 1, dtype=torch.bfloat16)[:, :, ::2, :-1]
    assert taken(backward, part, x.contiguous(), *args) == ()
    assert taken(backward, sliced, x.contiguous(), *args) == (x.numel() * 2,)


def test_cudnns_batch_norm_only_copies_the_gradient() -> None:
    x, per = empty(32, 64, 56, 56).to(memory_format=torch.channels_last), empty(64)
    rest = (per, per, per, per, per, True, 1e-5, [True] * 3)
    assert taken(aten.native_batch_norm.default, x, per, per, per, per, True, 0.1, 1e-5) == ()
    assert taken(aten.native_batch_norm_backward.default, x, x, *rest) == ()
    assert taken(aten.native_batch_norm_backward.default, x.contiguous(), x, *rest) == (x.numel() * 4,)


def flash(batch: int, heads: int, length: int, size: int, grouped: int = 0) -> list[torch.Tensor]:
    """The output's gradient, queries, keys, values and output as a model makes them: heads inside rows."""
    kinds = (heads, heads, grouped or heads, grouped or heads, heads)
    return [empty(batch, length, n, size, dtype=torch.bfloat16).transpose(1, 2) for n in kinds]


def backward_of_flash(tensors: list[torch.Tensor], arch: Arch = A100) -> tuple[int, ...]:
    rest = (empty(1), None, None, 0, 0, 0.0, True, empty(1), empty(1))
    return taken(aten._scaled_dot_product_flash_attention_backward.default, *tensors, *rest, arch=arch)


def test_flash_backward_keeps_the_queries_gradient_in_float32() -> None:
    # 900 rows are padded to 1024, heads of 80 to 96.
    sums, accumulated = 4 * 16 * 1024 * 4, 4 * 16 * 1024 * 96 * 4
    assert backward_of_flash(flash(4, 16, 900, 80)) == (sums, accumulated)
    whole = [t.contiguous() for t in flash(4, 16, 900, 80)]
    assert backward_of_flash(whole) == (4 * 16 * 900 * 80 * 2,) * 2 + (sums, accumulated)
    expanded = 4 * 16 * 900 * 80 * 2
    assert backward_of_flash(flash(4, 16, 900, 80, 2)) == (sums, accumulated, expanded, expanded)


@pytest.mark.parametrize(("size", "padded"), [(128, 128), (136, 192), (160, 192), (224, 256)])
def test_flash_pads_head_sizes_over_128_to_64(size: int, padded: int) -> None:
    """As torch 2.11 and 2.14 asked of an emulated A100: 24 MiB for 8 heads of 160 by 4,096 rows, 32 MiB for 224."""
    assert backward_of_flash(flash(1, 8, 4096, size)) == (8 * 4096 * 4, 8 * 4096 * padded * 4)


def test_flash_backward_of_packed_sequences() -> None:
    q = empty(5000, 8, 64, dtype=torch.bfloat16)
    bounds = empty(4, dtype=torch.int32)
    args = (q, q, q, q, q, empty(8, 5000), bounds, bounds, 2000, 2000, 0.0, False, empty(1), empty(1))
    rows = 5000 + 128 * 3
    assert taken(aten._flash_attention_backward.default, *args) == (rows * 8 * 4, rows * 8 * 64 * 4)


@pytest.mark.parametrize(
    ("blocks", "multiprocessors", "columns", "splits"),
    # Enough blocks: 1. 48 blocks on 108: two parts fill 0.89 of a wave, where three fill 0.67 of two; nine fill four
    # waves wholly, which is not worth it.
    [(100, 108, 32, 1), (48, 108, 16, 2), (48, 108, 45, 2), (1, 216, 4, 4), (1, 216, 1, 1), (90, 108, 8, 1)],
)
def test_keys_are_split_where_queries_are_few(blocks: int, multiprocessors: int, columns: int, splits: int) -> None:
    assert flash_splits(blocks, multiprocessors, columns) == splits


def test_flash_forward_of_a_small_batch_keeps_partial_outputs() -> None:
    op = aten._scaled_dot_product_flash_attention.default
    q = flash(1, 8, 256, 64)[1]
    # 32 blocks of queries on 216 places, and 16 of 256 keys: 5 parts would leave a block of keys over, 6 fill 192.
    k = empty(1, 8, 4096, 64, dtype=torch.bfloat16)
    splits = flash_splits(32, 216, 16)
    assert splits == 6
    assert taken(op, q, k, k, 0.0) == (6 * 8 * 256 * 4, 6 * 8 * 256 * 64 * 4)
    assert taken(op, q, k, k, 0.1) == ()
    assert taken(op, *flash(8, 16, 1024, 64)[1:4], 0.0, True) == ()


def efficient(size: int, dtype: torch.dtype, arch: Arch = A100, length: int = 512) -> tuple[int, ...]:
    q = empty(2, length, 8, size, dtype=dtype).transpose(1, 2)
    args = (q, q, q, q, None, q, empty(1), empty(), empty(), 0.0, [True, True, True, False])
    return taken(aten._scaled_dot_product_efficient_attention_backward.default, *args, arch=arch)


def test_efficient_backward_keeps_tiles_of_the_queries_gradient() -> None:
    heads, sums = 2 * 8, 2 * 8 * 512 * 4
    # 8 tiles of 64 x 64 for each head and 16 bytes of lock a tile.
    assert efficient(64, torch.bfloat16) == (sums, heads * 8 * (64 * 64 + 4) * 4)
    # 4 tiles of 128 x 128 where shared memory suffices; else 8 x 2 of 64 x 64 and dk, dv for 8 splits of keys.
    assert efficient(128, torch.bfloat16) == (sums, heads * 4 * (128 * 128 + 4) * 4)
    keys = 8 * 64 * 2 * 128
    assert efficient(128, torch.bfloat16, RTX4090) == (sums, heads * (16 * (64 * 64 + 4) + keys) * 4)
    # float32 multiplies output and gradient first and sums twice; then it needs tiles of dq, and none for dk and dv.
    product = 2 * 512 * 8 * 4
    assert efficient(64, torch.float32) == (64 * product, sums, sums, heads * 8 * (64 * 64 + 4) * 4)
    assert efficient(32, torch.float32) == (32 * product, sums, sums, heads * 8 * (64 * 64 + 4) * 4)
    assert efficient(96, torch.float32) == (96 * product, sums, sums, heads * 4 * 2 * (128 * 64 + 4) * 4)


def test_efficient_backward_in_float32_has_its_product_no_longer_when_the_workspace_is_made() -> None:
    """As a real H100 did it: a contiguous gradient, three results, product, sums, sums; then the first two go."""
    q, gradient = empty(4, 1024, 16, 64).transpose(1, 2), empty(4, 16, 1024, 64)
    args = (gradient, q, q, q, None, q, empty(1), empty(), empty(), 0.0, [True, True, True, False])
    assert temporaries(aten._scaled_dot_product_efficient_attention_backward.default, *args) == (
        Temporary(16_777_216, first=True), Temporary(16_777_216, followed=2),
        Temporary(262_144, followed=1), 262_144, 16_793_600
    )  # fmt: skip


def test_efficient_forward_accumulates_large_heads_in_float32() -> None:
    q = empty(2, 8, 512, 256, dtype=torch.float16)
    op = aten._scaled_dot_product_efficient_attention.default
    assert taken(op, q, q, q, None, True) == (2 * 8 * 512 * 256 * 4,)
    assert taken(op, q[..., :128], q[..., :128], q[..., :128], None, True) == ()
    assert taken(op, q.float(), q.float(), q.float(), None, True) == ()


def test_cudnn_backward_counts_what_is_known_of_its_workspace() -> None:
    gradient, q, k, v, out = flash(2, 8, 256, 64, 2)
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    rows = 2 * 8 * 256 * 4
    grouped = 2 * (2 * 8 * 256 * 64 * 2)
    assert taken(op, gradient, q, k, v, out, arch=T4) == (rows + rows * 64 + grouped,)


def test_cudnn_attention_takes_what_cudnn_said_for_described_cards() -> None:
    """cuDNN 9.19's plans in dry runs, 2 x 8 heads: what the unmodified torch asked of its allocator, by shape."""
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    for (length, keys, heads, size), ampere, hopper in (
        ((256, 512, 8, 64), 2_113_664, 1_065_216),
        ((256, 512, 2, 64), 4_210_816, None),
        ((1024, 128, 8, 128), 16_842_880, None),
    ):
        q, k = (empty(2, h, n, size, dtype=torch.bfloat16) for h, n in ((8, length), (heads, keys)))
        for arch, expected in ((A100, ampere), (RTX4090, ampere), (H100, hopper)):
            if expected is not None:
                assert taken(op, q, q, k, k, q, arch=arch) == (expected,)
    summed = empty(1, dtype=torch.bfloat16).expand(1, 8, 2048, 104)
    q = empty(1, 8, 2048, 104, dtype=torch.bfloat16)
    assert taken(op, summed, q, q, q, q, arch=H100) == (3_407_872, 6_881_536)
    forward = aten._scaled_dot_product_cudnn_attention.default
    assert (taken(forward, q, k, k, arch=A100), taken(forward, q, k, k, arch=H100)) == ((), (256,))


def test_indices_of_different_strides_are_copied_before_the_result() -> None:
    """TensorAdvancedIndexing.cpp: a CUDA kernel reads all indices with the same strides."""

    def index(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return empty(*shape, dtype=dtype)

    x, rows, columns = empty(40, 50, 8), index(30, 1), index(1, 20)
    both = 30 * 20 * 8, 30 * 20 * 8
    assert taken(aten.index.Tensor, x, [rows, columns]) == both
    assert all(one.first for one in temporaries(aten.index.Tensor, x, [rows, columns]) if isinstance(one, Temporary))
    assert taken(aten.index.Tensor, x, [index(30, 20), index(20)]) == both[:1]
    assert taken(aten.index.Tensor, x, [index(30), index(30)]) == ()
    assert taken(aten.index.Tensor, x, [index(30, dtype=torch.int32)]) == (240,)
    assert taken(aten.index.Tensor, x, [index(40, dtype=torch.bool), index(7)]) == ()
    assert taken(aten.index_put_.default, x, [rows, columns], empty(30, 20, 8)) == both


def test_accumulating_index_put_sorts_and_plain_does_not() -> None:
    x, indices, values = empty(1000, 64), [empty(5000, dtype=torch.int64)], empty(5000, 64)
    assert taken(aten.index_put_.default, x, indices, values) == ()
    # Four lists, and the sort: the other halves of its buffers, two passes for numbers up to 999, two tiles of 3840.
    sort = 2 * 40_192 + 2 * 2048 + 2 * 1024 + 256 + 255
    assert taken(aten.index_put_.default, x, indices, values, True) == (40_000,) * 4 + (sort,)
    spread = taken(aten._index_put_impl_.default, x, indices, empty(64), True)
    assert spread == (40_000,) * 4 + (sort, 5000 * 64 * 4)
    second = [None, empty(5000, dtype=torch.int64)]  # numbers up to 63,999: those of elements, not of rows
    assert taken(aten.index_put_.default, x, second, empty(1000, 5000), True) == (40_000,) * 4 + (sort,)
    few = [None, empty(5000, dtype=torch.int64), None]  # up to 199 in rows of 64: one pass
    one_pass = 2048 + 2 * 1024 + 256 + 255
    put = taken(aten.index_put_.default, empty(2, 100, 64), few, empty(2, 5000, 64), True)
    assert put == (40_000,) * 4 + (one_pass,)


H100_SORTS = {torch.uint8: 624_127, torch.bfloat16: 21_358_079, torch.float32: 25_574_911, torch.float64: 34_038_271}
A100_SORTS = {torch.float32: 25_873_919, torch.float64: 34_131_455, torch.int64: 34_131_455}
T4_SORTS = {torch.float32: 25_937_407, torch.float64: 34_334_207, torch.int64: 34_334_207}


@pytest.mark.parametrize(
    ("arch", "asked", "put", "put_wide"),
    [
        (H100, H100_SORTS, 653_823, 655_871),
        (A100, A100_SORTS, 655_871, 657_919),
        (RTX4090, A100_SORTS, 655_871, 657_919),
        (T4, T4_SORTS, 659_967, 662_015),
    ],
)
def test_sorts_take_what_torch_asked_for_on_emulated_cards(
    arch: Arch, asked: dict[torch.dtype, int], put: int, put_wide: int
) -> None:
    """In dry runs of torch 2.11: 2,097,152 numbers; 40,000 indices into 4096 rows of 256, and into so many numbers."""
    for dtype, size in asked.items():
        assert taken(aten.sort.default, empty(1 << 21, dtype=dtype), arch=arch) == (8 << 21, size)
    index, values = [empty(40_000, dtype=torch.int64)], empty(40_000, 256)
    op = aten.index_put_.default
    assert taken(op, empty(4096, 256), index, values, True, arch=arch)[4] == put
    for count, size in ((2304, 1), (2305, 43_007)):  # what one block sorts by itself, and one more
        few = [empty(count, dtype=torch.int64)], empty(count, 256)
        assert taken(op, empty(4096, 256), *few, True, arch=arch)[4] == size
    assert taken(op, empty(1 << 21), index, values[:, 0].contiguous(), True, arch=arch)[4] == put_wide


def test_masked_scatter_counts_before_every_element() -> None:
    x, mask, source = empty(2, 100, 64), empty(2, 100, 1, dtype=torch.bool), empty(50, 64)
    assert taken(aten.masked_scatter.default, x, mask, source) == (2 * 100 * 64 * 8, 2 * 100 * 64, 1279)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((100, 4096), (4096 * 8,)),
        # buffers of 200,192 + 400,128 bytes and 2,000,128 + 4,000,000; four passes, 17 and 163 tiles of 3072
        ((1, 50_000), (400_000, 600_320 + 4 * 2048 + 17 * 1024 + 256 + 255)),
        ((100, 5000), (4_000_000, 4_000_000, 2_000_000, 6_000_128 + 4 * 2048 + 163 * 1024 + 256 + 255)),
        ((200, 5000), (8_000_000, 12_000_000)),
    ],
)
def test_long_sorts_keep_indices_and_double_buffers(shape: tuple[int, int], sizes: tuple[int, ...]) -> None:
    assert taken(aten.sort.default, empty(*shape)) == sizes
    assert taken(aten.sort.stable, empty(*shape), stable=True, dim=-1) == sizes


def test_only_sums_and_scans_cast_as_a_whole() -> None:
    mask, x = empty(64, 100, dtype=torch.bool), empty(64, 100, dtype=torch.bfloat16)
    counts = empty(64, 100, dtype=torch.int64)
    assert taken(aten.sum.dim_IntList, mask, [1], result=counts[:, 0]) == (64 * 100 * 8,)
    assert taken(aten.cumsum.default, mask, 1, result=counts) == (64 * 100 * 8,)
    assert taken(aten.sum.dim_IntList, x, [1], result=empty(64)) == ()
    assert taken(aten.mean.dim, x, [1], result=x[:, 0]) == ()
    assert taken(aten.add.Tensor, x, x.float(), result=x.float()) == ()
    assert taken(aten.where.self, mask, x, x.float(), result=x.float()) == (64 * 100 * 4,)


def test_reduced_losses_keep_the_unreduced_one() -> None:
    x = empty(100, 100)
    for op in (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default):
        assert taken(op, x, x, result=empty()) == (40_000,)
        assert taken(op, x, x, 0, result=x) == ()
    logits = aten.binary_cross_entropy_with_logits.default
    assert taken(logits, x, x, result=empty()) == (40_000, 40_000)
    assert taken(logits, x, x, None, None, 0, result=x) == (40_000,)


def test_pools_follow_the_inputs_format() -> None:
    x = empty(2, 8, 16, 16)
    y, indices = x[:, :, ::2, ::2].contiguous(), empty(2, 8, 8, 8, dtype=torch.int64)
    last = x.to(memory_format=torch.channels_last)
    op = aten.max_pool2d_with_indices_backward.default
    rest = ([2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    assert taken(op, y, x, *rest) == ()
    assert taken(op, y, last, *rest) == (2 * 8 * 64 * 4, 2 * 8 * 64 * 8)
    gaps = empty(2, 8, 32, 16)[:, :, ::2]
    assert taken(op, y, gaps, *rest) == (2 * 8 * 256 * 4,)  # as torch 2.14.1 does on an emulated H100
    assert taken(aten.avg_pool2d_backward.default, y, gaps, [2, 2], [2, 2], [0, 0], False, True, None) == (16384,)
    assert taken(aten._adaptive_avg_pool2d_backward.default, y, gaps) == ()


def test_ctc_and_bags() -> None:
    probabilities, alpha = empty(50, 4, 20), empty(4, 50, 41)
    args = (empty(4), probabilities, empty(4, 20, dtype=torch.int64), [50] * 4, [20] * 4, empty(4), alpha, 0)
    assert taken(aten._ctc_loss_backward.default, *args) == (4 * 8, 4 * 8, 4 * 8, 4 * 50 * 41 * 4)
    indices = empty(1000, dtype=torch.int64)
    bag = (indices, indices, empty(10, dtype=torch.int64), empty(10, dtype=torch.int64), 500, False)
    # what the sort takes meanwhile, 100 + 500 partial rows of 64, six lists, two counters
    sizes = taken(aten._embedding_bag_dense_backward.default, empty(10, 64), *bag, 0, None)
    assert sizes == (8000, 8000, 8000, 1, 8000, 4000, 4000, 8, 8, 4800, 600 * 64 * 4)
    assert taken(aten._embedding_bag_dense_backward.default, empty(10, 64), *bag, 2, None) == ()


def test_foreach_norm_keeps_a_sum_for_every_chunk_of_the_largest() -> None:
    tensors = [empty(200_000), empty(10), empty(65_536)]
    assert taken(aten._foreach_norm.Scalar, tensors) == (3 * 4 * 4,)


def test_statistics_are_in_float32() -> None:
    x, weight = empty(4, 8, 5, 5, dtype=torch.bfloat16), empty(8, dtype=torch.bfloat16)
    flat = x.flatten(2)
    cases = [
        (aten.native_layer_norm.default, (flat, [25], None, None, 1e-5)),
        (aten.native_batch_norm.default, (x, weight, weight, weight, weight, True, 0.1, 1e-5)),
        (aten.native_group_norm.default, (x, weight.float(), weight.float(), 4, 8, 25, 2, 1e-5)),
        (aten.cudnn_batch_norm.default, (x, *(weight.float(),) * 4, True, 0.1, 1e-5)),
    ]
    for op, args in cases:
        output, mean, deviation, *_ = results.RESULTS[str(op)](args, {}, op(*args))
        assert (output.dtype, mean.dtype, deviation.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    _, buffer = results.RESULTS["aten.log_sigmoid_forward.default"]((x,), {}, aten.log_sigmoid_forward(x))
    assert buffer.numel() == 0


def test_group_norm_is_contiguous_before_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    x = empty(4, 8, 5, 5).to(memory_format=torch.channels_last)
    args = (x, None, None, 4, 8, 25, 2, 1e-5)
    made = aten.native_group_norm.default(*args)
    for version, last in (((2, 14), False), ((2, 15), True)):
        monkeypatch.setattr(results, "torch_version", lambda version=version: version)
        output = results.RESULTS["aten.native_group_norm.default"](args, {}, made)[0]
        assert output.is_contiguous(memory_format=torch.channels_last) == last
