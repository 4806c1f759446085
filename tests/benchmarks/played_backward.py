"""A backward without a model's arithmetic: gradients are put into ``param.grad`` and the hooks called, as autograd would."""

from collections.abc import Callable, Sequence

import torch

import megabucket as mb


class PlayedBackward:
    """Backwards of one wrapper that bring one gradient for each parameter.

    Args:
        grads: one for each of ``params``, which come in their order.
    """

    def __init__(
        self, ddp: mb.DistributedDataParallel, params: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor]
    ) -> None:
        self._sync = ddp.sync
        self._params = params
        self._grads = grads
        self._hooks: list[Callable[[torch.Tensor], object]] = []

    def begin(self) -> None:
        """Do what comes before the first hook."""
        self._sync._backward.is_open = self._sync._may_wait = True
        for hooks in self._sync._grad_hooks:
            hooks.begin_backward(may_wait=True, may_learn=True)
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad
        self._hooks = [next(iter(param._post_accumulate_grad_hooks.values())) for param in self._params]

    def call_hooks(self) -> None:
        """Bring all gradients."""
        for hook, param in zip(self._hooks, self._params, strict=True):
            hook(param)

    def end(self) -> None:
        """Do what comes after the last hook, but for the sync."""
        self._sync._backward.forget()
        self._sync._receive_rest()
        for hooks in self._sync._grad_hooks:
            hooks.end_backward()
