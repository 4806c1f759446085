"""Optimizers of other packages that update whole tensors, computed on the CPU, and a model of parameters that are hard on them.

For tests in one process and on ranks. Everything here is plain torch, and knows nothing of the library under test.
"""

from __future__ import annotations

import torch


class WholeTensors(torch.optim.Optimizer):
    """One update per tensor; ``begin`` makes its state, ``update`` writes to it and to the parameter."""

    update_kind = "tensor"

    def __init__(self, params, lr=0.02, **defaults):
        super().__init__(params, {"lr": lr, "weight_decay": 0.01, "beta": 0.9, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(self.begin(param))
                    state["step"] += 1
                    self.update(param, param.grad, state, group)


def trust_ratio(param, update):
    """Return the norm of the weights over that of the update, 1 if either is zero."""
    of_param, of_update = float(param.norm()), float(update.norm())
    return of_param / of_update if of_param > 0 and of_update > 0 else 1.0


class Lamb(WholeTensors):
    """Adam, scaled by a trust ratio per tensor."""

    def begin(self, param):
        return {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}

    def update(self, param, grad, state, group):
        first = state["exp_avg"].lerp_(grad, 1 - group["beta"])
        second = state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = first / (second.sqrt() + 1e-6) + group["weight_decay"] * param
        param.sub_(group["lr"] * trust_ratio(param, update) * update)


class Lars(WholeTensors):
    """SGD with momentum, scaled by a trust ratio per tensor. Counts in a tensor."""

    def begin(self, param):
        return {"step": torch.zeros(()), "momentum_buffer": None}

    def update(self, param, grad, state, group):
        grad = grad + group["weight_decay"] * param
        scaled = group["lr"] * trust_ratio(param, grad) * grad
        if state["momentum_buffer"] is None:
            state["momentum_buffer"] = torch.zeros_like(param)
        param.sub_(state["momentum_buffer"].mul_(group["beta"]).add_(scaled))


def as_matrix(tensor):
    """Return a tensor of any dimensions as a matrix, the first one by the others."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def root_of(matrix, power):
    """Return a power of a symmetric matrix. Its columns are dense, as those of ``eigh`` are."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=1e-12) ** power) @ vectors.mT


class Shampoo(WholeTensors):
    """Preconditioners of rows and columns; of a square matrix they have the shape of the parameter."""

    def begin(self, param):
        rows, columns = as_matrix(param).shape
        return {
            "step": 0,
            "left": 1e-4 * torch.eye(rows, dtype=param.dtype),
            "right": 1e-4 * torch.eye(columns, dtype=param.dtype),
            "kept": None,
        }

    def update(self, param, grad, state, group):
        matrix = as_matrix(grad)
        state["left"] += matrix @ matrix.mT
        state["right"] += matrix.mT @ matrix
        if state["step"] % 2:  # roots are used for two steps, so a resumed run needs them
            state["kept"] = [root_of(state["left"], -0.25), root_of(state["right"], -0.25)]
        left, right = state["kept"]
        param.sub_(group["lr"] * (left @ matrix @ right).reshape(param.shape))


class Soap(WholeTensors):
    """Adam in the eigenbasis of Shampoo's preconditioners. Its state is nested: lists, a tuple, a dict, texts, a switch."""

    def begin(self, param):
        sides = as_matrix(param).shape
        return {
            "step": torch.zeros(()),
            "GG": [torch.zeros(side, side, dtype=param.dtype) for side in sides],
            "Q": tuple(torch.eye(side, dtype=param.dtype) for side in sides),
            "moments": {"first": torch.zeros_like(param), "second": torch.zeros_like(param)},
            "is_first": True,
        }

    def update(self, param, grad, state, group):
        matrix, moments = as_matrix(grad), state["moments"]
        state["GG"][0].lerp_(matrix @ matrix.mT, 0.1)
        state["GG"][1].lerp_(matrix.mT @ matrix, 0.1)
        if state["is_first"] or int(state["step"]) % 2:
            state["Q"] = tuple(torch.linalg.eigh(one)[1] for one in state["GG"])  # neither symmetric nor in the order of rows
            state["is_first"] = False
        left, right = state["Q"]
        turned = (left.mT @ matrix @ right).reshape(param.shape)
        first = moments["first"].lerp_(turned, 1 - group["beta"])
        second = moments["second"].mul_(0.95).addcmul_(turned, turned, value=0.05)
        update = as_matrix(first / (second.sqrt() + 1e-8))
        param.sub_(group["lr"] * (left @ update @ right.mT).reshape(param.shape))


class Adam8bit(WholeTensors):
    """Moments of 8 bits with a scale per block of elements and a table of all values, as in bitsandbytes."""

    BLOCK = 8

    def begin(self, param):
        num_blocks = -(-param.numel() // self.BLOCK)
        return {
            "step": 0,
            "qmap": torch.linspace(-1, 1, 255),
            "state1": torch.full_like(param, 127, dtype=torch.uint8),
            "absmax1": torch.zeros(num_blocks),
            "second": torch.zeros_like(param),
        }

    def update(self, param, grad, state, group):
        first = self.unpacked(state, param).lerp_(grad, 1 - group["beta"])
        blocks = torch.nn.functional.pad(first.reshape(-1), (0, -param.numel() % self.BLOCK)).view(-1, self.BLOCK)
        scales = blocks.abs().amax(1)
        codes = ((blocks / scales.clamp(min=1e-30)[:, None] + 1) * 127).round().to(torch.uint8)
        state["absmax1"], state["state1"] = scales, codes.flatten()[: param.numel()].view(param.shape)
        state["second"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        param.sub_(group["lr"] * self.unpacked(state, param) / (state["second"].sqrt() + 1e-6))

    def unpacked(self, state, param):
        scales = state["absmax1"].repeat_interleave(self.BLOCK)[: param.numel()]
        return (state["qmap"][state["state1"].reshape(-1).long()] * scales).view(param.shape)


class WholeAdamW(torch.optim.AdamW):
    """AdamW, declared as one that updates whole tensors."""

    update_kind = "tensor"


WholeAdamW.__name__ = "AdamW"  # a checkpoint knows optimizers by the name of their class


def muon_and_adamw(matrices, others):
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(others, lr=0.02)]


OPTIMIZERS = {
    "Muon, AdamW": muon_and_adamw,
    "Adafactor": lambda matrices, others: [torch.optim.Adafactor([{"params": others}, {"params": matrices, "lr": 0.05}])],
    "LAMB": lambda matrices, others: [Lamb([{"params": matrices}, {"params": others, "weight_decay": 0.0}])],
    "Shampoo, AdamW, LARS": lambda matrices, others: [
        Shampoo(matrices),
        torch.optim.AdamW(others[:2], lr=0.02),
        Lars(others[2:]),
    ],
    "SOAP": lambda matrices, others: [Soap(matrices + others)],
    "8-bit Adam, Muon": lambda matrices, others: [Adam8bit(others), torch.optim.Muon(matrices, lr=0.02)],
    "AdamW on whole tensors": lambda matrices, others: [WholeAdamW(matrices + others, lr=0.02)],
}
"""Lists of optimizers over the matrices and the other parameters of a model."""

SHAPES = {
    "wide": (5, 24),
    "vector": (11,),
    "square": (8, 8),
    "scalar": (),
    "turned": (7, 6),
    "conv": (4, 3, 2, 2),
    "empty": (0, 3),
    "one": (1, 1),
    "cube": (3, 2, 5),
    "tall": (21, 3),
}


class Tensors(torch.nn.Module):
    """Parameters of all shapes; one is transposed, one channels-last. Their gradients are given, and may follow the weights."""

    def __init__(self, dtype=torch.float32, names=tuple(SHAPES)):
        super().__init__()
        for index, name in enumerate(names):
            values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(index)).to(dtype)
            if name == "turned":
                values = values.t().contiguous().t()
            if name == "conv":
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, torch.nn.Parameter(values))

    def forward(self, seed, pull=0.0):
        """Return a loss whose gradient is ``factors_of(seed)``, and in addition ``pull`` times each weight."""
        factors = factors_of(seed)
        terms = [(p * factors[name].to(p.dtype)).sum() + pull / 2 * (p * p).sum() for name, p in self.named_parameters()]
        return torch.stack(terms).sum()


def factors_of(seed):
    """Return a number per element: multiples of 12, so that sums and means over up to four ranks are exact, also in 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 12.0 * torch.randint(-5, 6, shape, generator=generator) for name, shape in SHAPES.items()}


def split(module):
    """Return the matrices of a module, and its other parameters."""
    params = list(module.parameters())
    return [param for param in params if param.dim() == 2], [param for param in params if param.dim() != 2]


def make(name, module):
    """Return the optimizers of a name over the parameters of a module."""
    return OPTIMIZERS[name](*split(module))
