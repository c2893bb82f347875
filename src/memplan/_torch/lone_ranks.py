"""Object collectives and the key-value store of torch.distributed for a rank whose peers do not exist."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch.distributed as dist

from memplan.errors import StepError

_unanswered: list[str] = []


def forget_ranks() -> None:
    """Clear the record of unanswered collectives and the stores of former ranks of this process."""
    _unanswered.clear()
    _stores.clear()


def unanswered_collectives() -> tuple[str, ...]:
    """Return the names of the operations so far that should have received another rank's object. They left this rank's
    own object in place."""
    return tuple(_unanswered)


def _refuse_wait(call: str) -> NoReturn:
    """Raise StepError for a call that would wait for another rank."""
    raise StepError(
        f"{call} waits for another rank, and there is none",
        expected="ranks that meet in collective operations, which do nothing here",
        do="Leave it out where one rank is recorded; or if it waits for rank 0, record that one: --rank 0",
    )


_stores: list[Any] = []
"""All stores, kept alive: a torch `PrefixStore` references only the C++ part of a store, which calls these methods."""

if dist.is_available():

    class OneRankStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
        """A store that no other rank writes to: reading a key that this rank has not set raises instead of waiting."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}
            _stores.append(self)

        def set(self, key: str, value: Any) -> None:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

        def get(self, key: str) -> bytes:
            if key not in self._values:
                _refuse_wait(f"store.get({key!r})")
            return self._values[key]

        def add(self, key: str, value: int) -> int:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            return total

        def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
            """Set a key to ``desired_value`` if it has the expected value, or no value and "" is expected."""
            expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
            if self._values.get(key, b"") == expected:
                self.set(key, desired_value)
            return self._values.get(key, expected)

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            for key in keys:
                if key not in self._values:
                    _refuse_wait(f"store.wait([{key!r}])")

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._values)

        def set_timeout(self, timeout: Any) -> None:
            """Do nothing: nothing is waited for."""

        def append(self, key: str, value: Any) -> None:
            value = value.encode() if isinstance(value, str) else bytes(value)
            self._values[key] = self._values.get(key, b"") + value

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[Any]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def has_extended_api(self) -> bool:
            return True


def _is_root(rank: int | None, group: Any, group_rank: int | None) -> bool:
    """Return whether this rank is the root of a collective operation: the only rank that sends, or that gathers.

    ``rank`` and ``group_rank`` name the root, as ``src``/``dst`` and ``group_src``/``group_dst`` of torch.distributed.
    """
    if group_rank is not None:
        return dist.get_rank(group) == group_rank
    return dist.get_rank() == (rank or 0)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Assume that each other rank sends the same object as this rank."""
    object_list[:] = [copy.deepcopy(obj) for _ in object_list]


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
    group_dst: int | None = None,
) -> None:  # fmt: skip
    """Replace `torch.distributed.gather_object`: assume that each other rank sends the same object as this rank."""
    if object_gather_list is not None and _is_root(dst, group, group_dst):
        _all_gather_object(object_gather_list, obj)


def _broadcast_object_list(
    object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
) -> None:
    """Replace `torch.distributed.broadcast_object_list`: the objects of another rank are not received."""
    if not _is_root(src, group, group_src):
        _unanswered.append("broadcast_object_list")


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, src: int | None = None,
    group: Any = None, group_src: int | None = None,
) -> None:  # fmt: skip
    """Replace `torch.distributed.scatter_object_list`: the object of another rank is not received."""
    if _is_root(src, group, group_src) and scatter_object_input_list is not None:
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]
    else:
        _unanswered.append("scatter_object_list")


def _recv_object_list(object_list: list[Any], *_: Any, **__: Any) -> int:
    """Replace `torch.distributed.recv_object_list`: nothing is received, and -1 stands for the sender's rank."""
    _unanswered.append("recv_object_list")
    return -1


OBJECT_COLLECTIVES: dict[str, Any] = {
    "all_gather_object": _all_gather_object, "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list, "scatter_object_list": _scatter_object_list,
    "recv_object_list": _recv_object_list, "send_object_list": lambda *_, **__: None,
}  # fmt: skip
"""Replacements for the collective operations on objects. Where all ranks send, the others are assumed to send the same
object as this rank. Where another rank sends to this rank, objects stay unchanged, and `unanswered_collectives` has the
operation's name."""
