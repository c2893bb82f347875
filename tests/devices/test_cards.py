"""The figures of the catalogue against others: clocks, bus widths, core counts, rates of the architectures."""

from __future__ import annotations

import pytest

from memplan.devices.cards import ALIASES, CARDS
from memplan.devices.context import KERNELS, MIB, READINGS, TORCH_KERNELS, context_of, expected_context
from memplan.devices.model import DTYPES, Device

FIGURES = ["capacity", "bandwidth", "flops", "architecture", "multiprocessors", "l2", "context", "link"]
BY_NAME = {card.name: card for card in CARDS}
each_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)

# deviceQuery's "Memory Clock rate" in MHz and "Memory Bus Width" in bits, as published for each card; of the RTX 4060
# half of the 17 Gbit/s of its specifications, of the A100 PCIe twice mixbench's 756 (it counts differently), of H200
# and B200 nvidia-smi's clocks.max.memory and the bus of the stacks. Two transfers a clock.
MEMORY = {
    "gtx1080ti": (5505, 352),
    "p100": (715, 4096),
    "p40": (3615, 384),
    "t4": (5001, 256),
    "v100-16gb": (877, 4096),
    "v100-32gb": (877, 4096),
    "a10": (6251, 384),
    "l4": (6251, 192),
    "l40s": (9001, 384),
    "rtx3060": (7501, 192),
    "rtx3090": (9751, 384),
    "rtx4060": (8500, 128),
    "rtx4090": (10501, 384),
    "rtx5090": (14001, 512),
    "a100-40gb": (1215, 5120),
    "a100-80gb": (1593, 5120),
    "a100-pcie": (1512, 5120),
    "h100": (2619, 5120),
    "h100-pcie": (1593, 5120),
    "h200": (3201, 6144),
    "b200": (3996, 7680),
}

# Boost clock in MHz. Hopper's whitepaper gives another one for its 8-bit to TF32 tensor cores; of the B200 it is the
# one that NVIDIA's own figures imply.
CLOCKS = {
    "gtx1080ti": (1582, 1582),
    "p100": (1303, 1303),
    "p40": (1531, 1531),
    "t4": (1590, 1590),
    "v100-16gb": (1530, 1530),
    "v100-32gb": (1530, 1530),
    "a10": (1695, 1695),
    "l4": (2040, 2040),
    "l40s": (2520, 2520),
    "rtx3060": (1777, 1777),
    "rtx3090": (1695, 1695),
    "rtx4060": (2460, 2460),
    "rtx4090": (2520, 2520),
    "rtx5090": (2407, 2407),
    "a100-40gb": (1410, 1410),
    "a100-80gb": (1410, 1410),
    "a100-pcie": (1410, 1410),
    "h100": (1980, 1830),
    "h100-pcie": (1755, 1620),
    "h200": (1980, 1830),
    "b200": (1965, 1856),
}

# FLOP per clock and multiprocessor: twice the fused multiply-adds of the architecture's whitepaper and of the CUDA
# programming guide's table of throughputs. GeForce cards add up 16-bit products in 32 bits at half the rate.
PER_CLOCK = {
    (6, 0): {"float64": 64, "float32": 128},
    (6, 1): {"float64": 8, "float32": 256, "int8": 1024},
    (7, 0): {"float64": 64, "float32": 128, "float16": 1024},
    (7, 5): {"float64": 4, "float32": 128, "float16": 1024, "int8": 2048},
    (8, 0): {"float64": 128, "float32": 128, "tf32": 1024, "bfloat16": 2048, "float16": 2048, "int8": 4096},
    (8, 6): {"float64": 4, "float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024, "int8": 2048},
    (8, 9): {
        "float64": 4, "float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024, "float8": 2048, "int8": 2048,
    },
    (9, 0): {
        "float64": 256, "float32": 256, "tf32": 2048, "bfloat16": 4096, "float16": 4096, "float8": 8192, "int8": 8192,
    },
    (10, 0): {
        "float64": 128, "float32": 256, "tf32": 4096, "bfloat16": 8192, "float16": 8192, "float8": 16384,
        "int8": 16384,
    },
    (12, 0): {
        "float64": 4, "float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024, "float8": 2048, "int8": 2048,
    },
}  # fmt: skip
HALVED_ON_GEFORCE = {"tf32", "bfloat16", "float16", "float8"}
WITHOUT_TENSOR_CORES = {"float32", "float64"}

# developer.nvidia.com/cuda-gpus and cuda-legacy-gpus
CAPABILITY = {
    "12.0": "GeForce RTX 5090",
    "10.0": "NVIDIA B200",
    "9.0": "NVIDIA H200, NVIDIA H100",
    "8.9": "NVIDIA L4, NVIDIA L40S, GeForce RTX 4090, GeForce RTX 4060",
    "8.6": "NVIDIA A10, GeForce RTX 3090, GeForce RTX 3060",
    "8.0": "NVIDIA A100",
    "7.5": "NVIDIA T4",
    "7.0": "NVIDIA V100",
    "6.1": "NVIDIA P40, GeForce GTX 1080 Ti",
    "6.0": "NVIDIA P100",
}

# CUDA cores of the data sheets, and those of one multiprocessor of the architecture
CORES = {
    "gtx1080ti": 3584, "p100": 3584, "p40": 3840,
    "t4": 2560, "v100-16gb": 5120, "v100-32gb": 5120, "a10": 9216, "l4": 7424, "l40s": 18176, "rtx3060": 3584,
    "rtx3090": 10496, "rtx4060": 3072, "rtx4090": 16384, "rtx5090": 21760, "a100-40gb": 6912, "a100-80gb": 6912,
    "a100-pcie": 6912, "h100": 16896, "h100-pcie": 14592, "h200": 16896, "b200": 18944,
}  # fmt: skip
CORES_OF_ONE = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}

# Total memory by nvidia-smi in MiB: torch has a little less of it.
NVIDIA_SMI = {
    "gtx1080ti": 11178, "p100": 16384, "p40": 23040,
    "t4": 15360, "v100-16gb": 16384, "v100-32gb": 32768, "a10": 23028, "l4": 23034, "l40s": 46068, "rtx3060": 12288,
    "rtx3090": 24576, "rtx4060": 8188, "rtx4090": 24564, "rtx5090": 32607, "a100-40gb": 40960, "a100-80gb": 81920,
    "a100-pcie": 81920, "h100": 81559, "h100-pcie": 81559, "h200": 143771, "b200": 183359,
}  # fmt: skip

# GB/s both ways, rounded up as data sheets and reviews print it
LINK = {
    "gtx1080ti": 32, "p100": 32, "p40": 32,
    "t4": 32, "v100-16gb": 32, "v100-32gb": 32, "a100-40gb": 64, "a100-80gb": 64, "a100-pcie": 64, "a10": 64, "l4": 64,
    "l40s": 64, "rtx3060": 64, "rtx3090": 64, "rtx4060": 32, "rtx4090": 64, "rtx5090": 128, "h100": 128,
    "h100-pcie": 128, "h200": 128, "b200": 128,
}  # fmt: skip

# Published readings of contexts: architecture, multiprocessors, MiB
CONTEXTS = [
    ((7, 5), 40, 133),
    ((7, 5), 40, 147),
    ((8, 6), 82, 256),
    ((8, 9), 34, 107),
    ((8, 9), 46, 120),
    ((8, 9), 142, 426),
    ((9, 0), 132, 520),
    ((12, 0), 188, 555),
    ((12, 0), 170, 828),
]


def test_the_tables_of_this_test_have_every_card() -> None:
    names = set(BY_NAME)
    assert [set(table) ^ names for table in (MEMORY, CLOCKS, CORES, NVIDIA_SMI, LINK, ALIASES)] == [set()] * 6
    assert len(BY_NAME) == len(CARDS)


@each_card
def test_bandwidth_is_clock_times_width(card: Device) -> None:
    clock, bits = MEMORY[card.name]
    assert card.bandwidth == pytest.approx(clock * 10**6 * 2 * bits / 8, rel=0.03)


@each_card
def test_flops_are_those_of_the_architecture_at_the_boost_clock(card: Device) -> None:
    vector, tensor = CLOCKS[card.name]
    expected = {}
    for dtype, each in PER_CLOCK[card.architecture].items():
        clock = vector if dtype in WITHOUT_TENSOR_CORES else tensor
        half = "GeForce" in card.title and dtype in HALVED_ON_GEFORCE
        expected[dtype] = card.multiprocessors * each * clock * 10**6 / (2 if half else 1)
    assert dict(card.flops) == pytest.approx(expected, rel=0.03)


@each_card
def test_dtypes_are_named_in_order(card: Device) -> None:
    assert list(card.flops) == [dtype for dtype in DTYPES if dtype in card.flops]


@each_card
def test_architecture_is_that_of_nvidias_list(card: Device) -> None:
    listed = CAPABILITY["{}.{}".format(*card.architecture)].split(", ")
    assert any(f"{card.title} ".startswith((f"{name} ", f"NVIDIA {name} ")) for name in listed)


@each_card
def test_multiprocessors_are_the_cores_over_those_of_one(card: Device) -> None:
    assert card.multiprocessors * CORES_OF_ONE.get(card.architecture, 128) == CORES[card.name]


@each_card
def test_capacity_is_a_little_less_than_nvidia_smi_shows(card: Device) -> None:
    assert 0.95 * NVIDIA_SMI[card.name] <= card.capacity / MIB < NVIDIA_SMI[card.name]


@each_card
def test_a_title_that_names_a_size_means_the_capacity(card: Device) -> None:
    *_, size, unit = card.title.split()
    if unit == "GB":
        assert card.capacity / 2**30 == pytest.approx(float(size), rel=0.09)


@each_card
def test_link_is_half_of_both_ways(card: Device) -> None:
    assert card.link == pytest.approx(LINK[card.name] / 2 * 10**9, rel=0.02)


@each_card
def test_every_figure_has_a_source(card: Device) -> None:
    assert [source.partition(":")[0] for source in card.sources] == FIGURES
    assert [source for source in card.sources if len(source.partition(":")[2]) < 10] == []


@each_card
def test_what_is_usable_is_the_capacity_less_the_context(card: Device) -> None:
    low, high = card.context
    assert 0 < low < high < 1 << 30
    assert (card.usable("low"), card.usable("high")) == (card.capacity - low, card.capacity - high)
    assert card.usable() == card.usable("high")


@pytest.mark.parametrize(("architecture", "multiprocessors", "mib"), CONTEXTS)
def test_published_contexts_lie_within(architecture: tuple[int, int], multiprocessors: int, mib: int) -> None:
    low, high = context_of(architecture, multiprocessors)
    assert low <= mib * MIB <= high


@pytest.mark.parametrize(("architecture", "multiprocessors", "mib"), CONTEXTS)
def test_published_contexts_are_near_the_expected_ones(
    architecture: tuple[int, int], multiprocessors: int, mib: int
) -> None:
    """All but the last were read before the first kernel was loaded, and that after work."""
    low, _ = context_of(architecture, multiprocessors)
    worked = (architecture, multiprocessors, mib) == CONTEXTS[-1]
    read = mib * MIB + (0 if worked else TORCH_KERNELS)
    least, most = (share * expected_context(low, convolutions=worked, products=worked) for share in READINGS)
    assert least <= read <= most


def test_kernels_cover_what_was_read() -> None:
    # torch 1.13, all kernels loaded at once or not: pytorch#86509; of the readings only the RTX 5090's is after work
    idle = [mib * MIB - context_of(architecture, count)[0] for architecture, count, mib in CONTEXTS[:-1]]
    assert max(idle) + 666_632_192 - 287_047_680 <= KERNELS
    assert max(idle) < 112 * MIB  # as the source says


def test_an_architecture_that_is_not_known_gets_the_widest_context() -> None:
    low, high = context_of((99, 0), 100)
    known = [context_of(architecture, 100) for architecture in PER_CLOCK]
    assert (low, high) == (min(known)[0], max(high for _, high in known))


def test_a_card_is_a_value() -> None:
    card = BY_NAME["h100"]
    assert len({card, card}) == 1
    with pytest.raises(TypeError):
        card.flops["float32"] = 0  # pyright: ignore[reportIndexIssue]
    assert str(card) == "h100: NVIDIA H100 SXM5 80 GB, 79.2 GiB"
