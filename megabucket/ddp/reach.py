"""How far a backward goes: through everything, or to some gradients that were asked for."""

from __future__ import annotations

from typing import Any

import torch


def goes_everywhere(node: Any) -> bool:
    """Return whether the backward that has come to a node of autograd goes on to everything behind it.

    ``backward()`` does. ``torch.autograd.grad`` and ``backward(inputs=...)`` go to what was asked for only, and come to a node
    where they begin also when nothing of it lies behind. Call it in a hook of the node; ``None`` where torch names none.
    """
    # Torch asks itself the first question about nodes that it runs, and never answers the second one for where it begins.
    if not torch.autograd._is_checkpoint_valid():
        return False
    following = [] if node is None else [behind for behind, _ in node.next_functions if behind is not None]
    return all(map(torch._C._will_engine_execute_node, following))
