"""A store that counts what it is asked, by kind of operation and key."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class CountingStore(dist.Store):
    """A store in this process. Threads stand for ranks.

    >>> store = CountingStore()
    >>> store.set("rank/3", "beat")
    >>> store.multi_get(["rank/3"]), store.values
    ([b'beat'], Counter({'set rank': 1, 'multi_get rank': 1}))
    """

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()
        self._lock = threading.Lock()
        self.operations: Counter[str] = Counter()
        """Requests, by kind."""
        self.values: Counter[str] = Counter()
        """Keys in the requests, by kind and name of the key."""
        self.num_bytes: Counter[str] = Counter()
        """Bytes of the values that were sent or received, in the same way."""

    def clear(self) -> None:
        """Count from zero."""
        with self._lock:
            for counts in (self.operations, self.values, self.num_bytes):
                counts.clear()

    def _count(self, kind: str, keys: Sequence[str], values: Sequence[bytes | str] = ()) -> None:
        with self._lock:
            self.operations[kind] += 1
            for index, key in enumerate(keys):
                name = f"{kind} {_name_of(key)}"
                self.values[name] += 1
                if values:
                    self.num_bytes[name] += len(values[index])

    def set(self, key: str, value: str) -> None:
        self._count("set", [key], [value])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count("get", [key], [value])
        return value

    def add(self, key: str, value: int) -> int:
        self._count("add", [key])
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys)
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set", [key], [desired])
        return self._store.compare_set(key, expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count("multi_get", keys, values)
        return values

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._count("wait", keys)
        self._store.wait(keys, *timeout)


_NAMES = ("rank", "host", "present", "watch", "finding", "group", "token", "instances")


def _name_of(key: str) -> str:
    parts = key.split("/")
    return next((f"board {name}" if "board" in parts and name == "rank" else name for name in _NAMES if name in parts), key)
