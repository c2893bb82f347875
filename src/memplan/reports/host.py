"""Part of reports about the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

from memplan._bytes import format_bytes
from memplan.explanation.host import host_sentence
from memplan.explanation.model import Explanation, HostNeed
from memplan.reports.document import Field, Line, Part, number_field, table_of
from memplan.simulation.host import HostTerm

_LABELS: dict[HostTerm, str] = {
    "tensors": "tensors on the CPU",
    "pinned": "pinned blocks",
    "shared": "shared memory (/dev/shm)",
    "loading": "samples in loaders' workers",
    "cached": "freed samples in other workers",
    "arrays": "numpy arrays of data sets",
    "workers": "loaders' worker processes",
    "python": "Python and torch",
}
_SMALL = 64 << 20
"""Bytes in addition to Python and torch up to which the host's memory is not shown without a budget."""
_DOCKER_SHM = 64 << 20
"""Size of ``/dev/shm`` in a container without ``--shm-size`` (docs.docker.com, "docker container run")."""


def parts(explanation: Explanation) -> Iterator[Part]:
    """Yield the host's memory at its peak by cause, whether it fits the budget, and settings that it needs."""
    need = explanation.host
    if need is None:
        return
    peak = need.use.peak
    if need.budget is None and peak.bytes - peak.terms.get("python", 0) <= _SMALL:
        return
    terms = sorted(peak.terms.items(), key=lambda term: -term[1])
    fields = [Field("On the host", lambda term: _LABELS[term[0]]), number_field("bytes", lambda term: term[1])]
    yield table_of(terms, fields, total="at its peak")
    verdict = "good" if need.fits else "bad"
    yield Line(host_sentence(need, explanation.device), "" if need.budget is None else verdict)
    yield from _advice(need)


def _advice(need: HostNeed) -> Iterator[Part]:
    """Yield the lines about memory that settings change: pinned memory, ``/dev/shm`` and the number of workers."""
    use = need.use
    pinned = use.peak.terms.get("pinned", 0)
    if pinned > use.pinned_tensors:
        yield (
            f"Pinned memory: {format_bytes(use.pinned_tensors)} of tensors take {format_bytes(pinned)}, as torch "
            "rounds each block to a power of two and gives none back."
        )
    if use.shared > _DOCKER_SHM:
        yield (
            f"Workers put up to {format_bytes(use.shared)} in /dev/shm; a Docker container has 64 MiB there: run it "
            "with --shm-size or --ipc=host, or lower prefetch_factor."
        )
    if "workers" in use.peak.terms:
        yield Line("Data that a forked worker only reads are shared with the main process, and counted once.", "dim")
