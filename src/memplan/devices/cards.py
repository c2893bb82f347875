"""The cards. Every figure says where it is from, and how that was read:

* ``(copy)``: read in a public copy, reprint or quotation of NVIDIA's document, not in NVIDIA's own file;
* ``(output)``: what a driver printed (deviceQuery, torch's device properties), as published;
* ``(computed)``: multiprocessors x FLOP per clock and multiprocessor of the architecture x boost clock.

Data sheets often print sparse FLOP/s, twice the dense ones: halved here, where it says so.
"""

from __future__ import annotations

from memplan.devices.context import MIB, SOURCE, context_of
from memplan.devices.links import link_of
from memplan.devices.model import Device

_GB = 10**9
_LIST = "architecture: NVIDIA, CUDA GPU compute capability (developer.nvidia.com/cuda-gpus)"
_LEGACY = "architecture: NVIDIA, legacy CUDA GPU compute capability (developer.nvidia.com/cuda-legacy-gpus)"
_VOLTA = "flops: A100 whitepaper, comparison with the V100 (copy)"
_ADA = "Ada whitepaper v2.1, appendix A (copy)"
_GA102 = "GA102 whitepaper v2 (copy)"
_FP64_64 = "float64 1/64 of float32 by the architecture's whitepaper (copy)"
_NO_HALF = "no units that multiply float16 and sum up in 32 bits: float32's are used (Pascal whitepaper, copy)"
_QUERY = "multiprocessors: deviceQuery (output)"
_TORCH = "multiprocessors: torch device properties (output)"
_L2_QUERY = "l2: deviceQuery (output)"


def _card(
    name: str,
    title: str,
    architecture: tuple[int, int],
    *,
    multiprocessors: int,
    capacity: int,
    bandwidth: float,
    tera: dict[str, float],
    l2: float,
    sources: tuple[str, ...],
) -> Device:
    """Return a card of the catalogue.

    ``bandwidth`` is in GB/s, ``tera`` dtype -> dense TFLOP/s, ``l2`` in MiB, ``capacity`` in bytes.
    """
    link, link_source = link_of(name)
    return Device(
        name=name,
        title=title,
        capacity=capacity,
        bandwidth=round(bandwidth * _GB),
        rates=tuple((dtype, round(rate * 10**12)) for dtype, rate in tera.items()),
        architecture=architecture,
        multiprocessors=multiprocessors,
        l2=round(l2 * MIB),
        context=context_of(architecture, multiprocessors),
        sources=(*sources, SOURCE, link_source),
        link=link,
    )


def _seen(least: str, most: str) -> str:
    """Return the source of a capacity that is the least of several published readings, in MiB."""
    return f"capacity: the least of {least} to {most} MiB that torch or deviceQuery showed on Linux (output)"


_PASCAL = (
    _card(
        "gtx1080ti", "NVIDIA GeForce GTX 1080 Ti", (6, 1),
        multiprocessors=28, capacity=11164 * MIB, bandwidth=484.4, l2=2.75,
        tera={"float64": 0.354, "float32": 11.34, "int8": 45.4},
        sources=(
            _seen("11164", "11178"),
            "bandwidth: 5505 MHz x 352 bit by deviceQuery (output)",
            f"flops: at the boost clock of 1582 MHz, as deviceQuery shows (computed); {_NO_HALF}",
            _LEGACY, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "p100", "NVIDIA P100 PCIe 16 GB", (6, 0),
        multiprocessors=56, capacity=16276 * MIB, bandwidth=732, l2=4,
        tera={"float64": 4.7, "float32": 9.3},
        sources=(
            _seen("16276", "16281"),
            "bandwidth: microway.com's copy of the data sheet (copy); 715 MHz x 4096 bit by deviceQuery",
            f"flops: microway.com's copy of the data sheet (copy); {_NO_HALF}",
            _LEGACY, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "p40", "NVIDIA P40", (6, 1),
        multiprocessors=30, capacity=22919 * MIB, bandwidth=346, l2=3,
        tera={"float64": 0.367, "float32": 11.76, "int8": 47},
        sources=(
            "capacity: 22919 MiB by deviceQuery on Linux, in both readings that were found (output)",
            "bandwidth: the P40 data sheet as listed by omegaco.ae (copy); 3615 MHz x 384 bit by deviceQuery",
            f"flops: at the boost clock of 1531 MHz, int8 by the data sheet as listed there (copy); {_NO_HALF}",
            _LEGACY, _QUERY, _L2_QUERY,
        ),
    ),
)  # fmt: skip

_TURING_AND_VOLTA = (
    _card(
        "t4", "NVIDIA T4", (7, 5),
        multiprocessors=40, capacity=14912 * MIB, bandwidth=320, l2=4,
        tera={"float64": 0.253, "float32": 8.1, "float16": 65, "int8": 130},
        sources=(
            _seen("14912", "15110"),
            "bandwidth: Turing whitepaper (copy), and 5001 MHz x 256 bit by deviceQuery; the T4 data sheet prints 300",
            "flops: T4 data sheet (copy); float64 1/32 of float32 by the Turing whitepaper (copy)",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "v100-16gb", "NVIDIA V100 SXM2 16 GB", (7, 0),
        multiprocessors=80, capacity=16_911_433_728, bandwidth=900, l2=6,
        tera={"float64": 7.8, "float32": 15.7, "float16": 125},
        sources=(
            _seen("16128", "16160"),
            "bandwidth: A100 whitepaper, comparison with the V100 (copy); 898 by deviceQuery's clock",
            _VOLTA, _LEGACY, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "v100-32gb", "NVIDIA V100 SXM2 32 GB", (7, 0),
        multiprocessors=80, capacity=34_058_272_768, bandwidth=900, l2=6,
        tera={"float64": 7.8, "float32": 15.7, "float16": 125},
        sources=(
            _seen("32480", "32511"),
            "bandwidth: A100 whitepaper, comparison with the V100 (copy); 898 by deviceQuery's clock",
            _VOLTA, _LEGACY, _QUERY, _L2_QUERY,
        ),
    ),
)  # fmt: skip

_A100 = {"float64": 19.5, "float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312, "int8": 624}
_A100_FLOPS = "flops: A100 whitepaper, dense figures; float64 on tensor cores (copy)"

_AMPERE = (
    _card(
        "a100-40gb", "NVIDIA A100 SXM4 40 GB", (8, 0),
        multiprocessors=108, capacity=42_298_834_944, bandwidth=1555, l2=40,
        tera=_A100,
        sources=(
            _seen("40339", "40654"),
            "bandwidth: A100 data sheet (copy)",
            _A100_FLOPS, _LIST, _QUERY,
            "l2: A100 whitepaper, 40960 KB (copy)",
        ),
    ),
    _card(
        "a100-80gb", "NVIDIA A100 SXM4 80 GB", (8, 0),
        multiprocessors=108, capacity=81038 * MIB, bandwidth=2039, l2=40,
        tera=_A100,
        sources=(
            _seen("81038", "81251"),
            "bandwidth: A100 data sheet (copy)",
            _A100_FLOPS, _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "a100-pcie", "NVIDIA A100 PCIe 80 GB", (8, 0),
        multiprocessors=108, capacity=81049 * MIB, bandwidth=1935, l2=40,
        tera=_A100,
        sources=(
            _seen("81049", "81154"),
            "bandwidth: A100 data sheet (copy)",
            _A100_FLOPS, _LIST,
            "multiprocessors: mixbench#47 (output)",
            "l2: mixbench#47 (output)",
        ),
    ),
    _card(
        "a10", "NVIDIA A10", (8, 6),
        multiprocessors=72, capacity=23_609_475_072, bandwidth=600, l2=6,
        tera={"float64": 0.488, "float32": 31.2, "tf32": 62.5, "bfloat16": 125, "float16": 125, "int8": 250},
        sources=(
            _seen("22516", "22599"),
            "bandwidth: A10 data sheet (copy)",
            f"flops: A10 data sheet, dense figures (copy); {_FP64_64}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "rtx3060", "NVIDIA GeForce RTX 3060 12 GB", (8, 6),
        multiprocessors=28, capacity=11901 * MIB, bandwidth=360, l2=2.25,
        tera={"float64": 0.199, "float32": 12.74, "tf32": 12.74, "bfloat16": 25.5, "float16": 25.5, "int8": 101.9},
        sources=(
            f"{_seen('11901', '12045')}; Windows shows 12288",
            "bandwidth: 15 Gbit/s x 192 bit, as deviceQuery shows (output)",
            "flops: as the RTX 3090's for each multiprocessor, at the boost clock of 1777 MHz (computed); NVIDIA "
            "announced 13 shader and 101 (sparse, added up in 16 bits) tensor TFLOPS (copy)",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "rtx3090", "NVIDIA GeForce RTX 3090", (8, 6),
        multiprocessors=82, capacity=24124 * MIB, bandwidth=936, l2=6,
        tera={"float64": 0.556, "float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71, "int8": 284.7},
        sources=(
            _seen("24124", "24268"),
            f"bandwidth: {_GA102}",
            f"flops: {_GA102}, dense, added up in 32 bits: half of the rate in 16; tf32, bfloat16, int8 (computed); "
            f"{_FP64_64}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
)  # fmt: skip

_ADA_CARDS = (
    _card(
        "l4", "NVIDIA L4", (8, 9),
        multiprocessors=58, capacity=23_612_293_120, bandwidth=300, l2=48,
        tera={
            "float64": 0.473, "float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121, "float8": 242.5, "int8":
            242.5,
        },
        sources=(
            _seen("22518", "22693"),
            "bandwidth: L4 data sheet (copy)",
            f"flops: L4 data sheet, its sparse figures halved (copy); {_FP64_64}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "l40s", "NVIDIA L40S", (8, 9),
        multiprocessors=142, capacity=47_576_711_168, bandwidth=864, l2=96,
        tera={
            "float64": 1.43, "float32": 91.6, "tf32": 183, "bfloat16": 362.05, "float16": 362.05, "float8": 733, "int8":
            733,
        },
        sources=(
            _seen("45373", "45589"),
            "bandwidth: L40S data sheet (copy)",
            f"flops: L40S data sheet, dense figures (copy); {_FP64_64}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "rtx4060", "NVIDIA GeForce RTX 4060", (8, 9),
        multiprocessors=24, capacity=7807 * MIB, bandwidth=272, l2=24,
        tera={
            "float64": 0.236, "float32": 15.11, "tf32": 15.11, "bfloat16": 30.2, "float16": 30.2, "float8": 60.5,
            "int8": 120.9,
        },
        sources=(
            "capacity: 7807 MiB by torch on Linux, the only reading that was found (output); OpenCL showed 7820, and "
            "Windows shows 8188",
            "bandwidth: 17 Gbit/s x 128 bit, specifications as listed by fpsbench.com (copy)",
            "flops: as the RTX 4090's for each multiprocessor, at the boost clock of 2460 MHz (computed); as listed by "
            "hmc-tech.com (copy)",
            _LIST,
            "multiprocessors: hashcat (output)",
            "l2: specifications as listed by fpsbench.com (copy)",
        ),
    ),
    _card(
        "rtx4090", "NVIDIA GeForce RTX 4090", (8, 9),
        multiprocessors=128, capacity=24081 * MIB, bandwidth=1008, l2=72,
        tera={
            "float64": 1.29, "float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2, "float8": 330.3,
            "int8": 660.6,
        },
        sources=(
            f"{_seen('24081', '24217')}; Windows shows 24564",
            f"bandwidth: {_ADA}",
            f"flops: {_ADA}, dense, added up in 32 bits: half of the rate in 16; {_FP64_64}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
)  # fmt: skip

_H100 = {
    "float64": 66.9, "float32": 66.9, "tf32": 494.7, "bfloat16": 989.4, "float16": 989.4, "float8": 1978.9,
    "int8": 1978.9,
}  # fmt: skip
_H100_FLOPS = "H100 whitepaper v1.04, table 3, dense figures; float64 on tensor cores (copy)"

_HOPPER_AND_BLACKWELL = (
    _card(
        "h100", "NVIDIA H100 SXM5 80 GB", (9, 0),
        multiprocessors=132, capacity=85_017_755_648, bandwidth=3350, l2=50,
        tera=_H100,
        sources=(
            _seen("81079", "81106"),
            "bandwidth: H100 data sheet (copy)",
            f"flops: {_H100_FLOPS}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
    _card(
        "h100-pcie", "NVIDIA H100 PCIe 80 GB", (9, 0),
        multiprocessors=114, capacity=81008 * MIB, bandwidth=2039, l2=50,
        tera={
            "float64": 51.2, "float32": 51.2, "tf32": 378, "bfloat16": 756, "float16": 756, "float8": 1513,
            "int8": 1513,
        },
        sources=(
            "capacity: 81008 MiB by torch, the only reading that was found (output)",
            "bandwidth: H100 whitepaper v1.04, table 3 (copy); the data sheet prints 2000",
            "flops: H100 data sheet, its sparse figures halved; float64 on tensor cores (copy)",
            _LIST, _TORCH,
            "l2: nvaccelinfo (output)",
        ),
    ),
    _card(
        "h200", "NVIDIA H200 SXM 141 GB", (9, 0),
        multiprocessors=132, capacity=143156 * MIB, bandwidth=4800, l2=60,
        tera=_H100,
        sources=(
            "capacity: 143156 MiB by torch (output); an out-of-memory message that names no card has 139.72 GiB",
            "bandwidth: H200 data sheet (copy)",
            f"flops: H200 product page, the same as the H100's (copy); {_H100_FLOPS}",
            _LIST, _TORCH,
            "l2: torch device properties (output)",
        ),
    ),
    _card(
        "b200", "NVIDIA B200 SXM 180 GB", (10, 0),
        multiprocessors=148, capacity=182631 * MIB, bandwidth=7700, l2=126.5,
        tera={
            "float64": 37, "float32": 75, "tf32": 1100, "bfloat16": 2250, "float16": 2250, "float8": 4500, "int8": 4500,
        },
        sources=(
            _seen("182631", "182642"),
            "bandwidth: HGX B200 data sheet (copy); 7672 by the driver's clock and bus (pytorch/ao#4002), 8000 in the "
            "DGX B200's",
            "flops: HGX B200 data sheet, its sparse figures halved (copy)",
            _LIST, _TORCH,
            "l2: pytorch/ao#4002 (output)",
        ),
    ),
    _card(
        "rtx5090", "NVIDIA GeForce RTX 5090", (12, 0),
        multiprocessors=170, capacity=33_660_534_784, bandwidth=1792, l2=96,
        tera={
            "float64": 1.64, "float32": 104.8, "tf32": 104.8, "bfloat16": 209.5, "float16": 209.5, "float8": 419,
            "int8": 838,
        },
        sources=(
            _seen("32101", "32120"),
            "bandwidth: RTX Blackwell whitepaper v1.1 (copy)",
            "flops: RTX Blackwell whitepaper v1.1, dense, added up in 32 bits: half of the rate in 16 (copy); tf32 and "
            f"int8 (computed); {_FP64_64}",
            _LIST, _QUERY, _L2_QUERY,
        ),
    ),
)  # fmt: skip

CARDS: tuple[Device, ...] = (*_PASCAL, *_TURING_AND_VOLTA, *_AMPERE, *_ADA_CARDS, *_HOPPER_AND_BLACKWELL)

ALIASES: dict[str, tuple[str, ...]] = {
    "gtx1080ti": ("1080ti", "gtx1080ti 11gb"),
    "p100": ("p100 16gb", "p100 pcie"),
    "p40": ("p40 24gb",),
    "t4": ("t4 16gb",),
    "v100-16gb": ("v100 sxm2 16gb", "v100 sxm 16gb", "v100 16"),
    "v100-32gb": ("v100", "v100 sxm2 32gb", "v100 sxm 32gb", "v100 32", "v100 sxm2"),
    "a10": ("a10 24gb",),
    "a100-40gb": ("a100 sxm4 40gb", "a100 sxm 40gb", "a100 40", "a100 pcie 40gb", "a100 40gb pcie"),
    "a100-80gb": ("a100", "a100 sxm4 80gb", "a100 sxm 80gb", "a100 80", "a100 sxm", "a100 sxm4", "a100 80gb sxm"),
    "a100-pcie": ("a100 80gb pcie", "a100 pcie 80gb"),
    "l4": ("l4 24gb",),
    "l40s": ("l40s 48gb",),
    "rtx3060": ("3060", "rtx3060 12gb"),
    "rtx3090": ("3090", "rtx3090 24gb"),
    "rtx4060": ("4060", "rtx4060 8gb"),
    "rtx4090": ("4090", "rtx4090 24gb"),
    "rtx5090": ("5090", "rtx5090 32gb"),
    "h100": ("h100 80gb hbm3", "h100 sxm", "h100 sxm5", "h100 80gb", "h100 sxm 80gb", "h100 hbm3", "h100 80"),
    "h100-pcie": ("h100 80gb pcie",),
    "h200": ("h200 sxm", "h200 141gb", "h200 sxm 141gb"),
    "b200": ("b200 180gb", "b200 sxm", "b200 sxm 180gb"),
}
"""Names that `find` takes besides name and title; a plain name is the largest version of the card."""
