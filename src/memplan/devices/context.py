"""What CUDA itself holds on a card: an interval, and the expected bytes with torch's and the libraries' kernels."""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20

THREADS = {
    (5, 0): 2048, (5, 2): 2048, (6, 0): 2048, (6, 1): 2048, (7, 0): 2048, (7, 5): 1024,
    (8, 0): 2048, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (9, 0): 2048,
    (10, 0): 2048, (10, 3): 2048, (11, 0): 1536, (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip
"""Threads that a multiprocessor can hold at a time (CUDA programming guide, technical specifications)."""

STACK = KIB
"""Bytes of stack that every such thread has by default (216 MiB on an A100: 108 x 2048 x 1 KiB)."""

PER_MULTIPROCESSOR = 1126 * KIB
"""What else each multiprocessor costs: the most with which no published reading is below the low end."""

KERNELS = 512 * MIB
"""From the low to the high end. Loading all of torch's kernels at once, not when each is first used, added 362 MiB,
and the readings are up to 111 MiB above the low end before that."""

SOURCE = (
    "context: 1 KiB of stack for each thread that the card can hold and 1.1 MiB for each multiprocessor, and up to "
    "512 MiB of kernels; fitted to published readings of idle contexts: 133 to 147 MiB on a T4, 107 on an RTX 4060 Ti "
    "and 555 on an RTX PRO 6000 Blackwell (llama.cpp#23604), 120 on an RTX 4070, 256 on an RTX 3090, 426 on an "
    "RTX 6000 Ada (unsloth-zoo#1053), 520 on an H200 (slide2vec#326); 828 on an RTX 5090 after work; "
    "all kernels loaded at once: 362 more (pytorch#86509)"
)


def context_of(architecture: tuple[int, int], multiprocessors: int) -> tuple[int, int]:
    """Return the least and the most that a CUDA context takes, in bytes.

    It grows with the multiprocessors, since every thread that the card can hold has its stack, and with the kernels
    that have been loaded. Before CUDA 11.7 all were loaded at the start.

    Args:
        architecture: compute capability; one that is not in `THREADS` gets the widest interval.
        multiprocessors: how many the card has.

    Example:
        >>> low, high = context_of((9, 0), 132)
        >>> low < 520 * MIB < high
        True
    """
    known = (THREADS[architecture],) if architecture in THREADS else THREADS.values()
    low = multiprocessors * (min(known) * STACK + PER_MULTIPROCESSOR)
    high = multiprocessors * (max(known) * STACK + PER_MULTIPROCESSOR) + KERNELS
    return low, high


IDLE = 1.2
"""Idle contexts take this multiple of the low end: the median of the published readings in `SOURCE`, 1.0 to 1.7."""
TORCH_KERNELS, CUDNN, CUBLAS = 92 * MIB, 19 * MIB, 66 * MIB
"""What the first kernels load. Source: NVML's bytes of 226 processes on an H100 and an H200 with torch 2.11 and CUDA 13
(``goldens/``): 610 MiB with torch's own kernels, 628 to 630 with cuDNN, 676 to 678 with cuBLAS (740 on the H200), 694
with both (758)."""
READINGS = (0.8, 1.25)
"""Those 226 and the published readings lie between these multiples of the expected bytes."""


def expected_context(low: int, *, convolutions: bool, products: bool) -> int:
    """Return the bytes that a CUDA context is expected to take once a step has run.

    Args:
        low: its lower bound, of `context_of`.
        convolutions: whether the step loads cuDNN's kernels.
        products: whether it loads cuBLAS's kernels, for matrix products.
    """
    return round(low * IDLE) + TORCH_KERNELS + CUDNN * convolutions + CUBLAS * products
