"""Whether a graph of autograd leads to a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def depends_on(nodes: Iterable[Any], params: Sequence[torch.Tensor]) -> bool:
    """Return whether one of the parameters is a leaf of the graphs that end in ``nodes``. Visits the whole graph."""
    wanted = set(map(id, params))
    seen: set[Any] = set()  # holds the nodes, too: Python makes a new object of one that nobody holds
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
