"""A gradient that comes late on its stream."""

import torch


class Slow(torch.autograd.Function):
    """Passes on what it gets, forward and backward; backward sleeps on its stream before."""

    @staticmethod
    def forward(_, inputs):
        return inputs.clone()

    @staticmethod
    def backward(_, grad):
        torch.cuda._sleep(20_000_000)
        return grad.clone()
