"""The systems that ``gpu.py`` compares: one model each, the same seed, the same fused AdamW, world size 1."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

import megabucket as mb
from megabucket.fused import Linear as FusedLinear


@dataclass(frozen=True)
class Setup:
    """A model, its batch, and the dtype of its arithmetic (parameters are float32)."""

    device: torch.device
    build: Callable[[type[torch.nn.Linear]], torch.nn.Module]
    batch: Callable[[], torch.Tensor]
    autocast: bool
    bucket_mb: float

    def module(self, linear: type[torch.nn.Linear] = torch.nn.Linear) -> torch.nn.Module:
        torch.manual_seed(0)
        with self.device:  # a GPU makes a billion numbers in no time
            return self.build(linear)

    def loss(self, module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return module(batch).float()

    def describe(self) -> str:
        with torch.device("meta"):
            params = list(self.build(torch.nn.Linear).parameters())
        dtype = "bf16 autocast" if self.autocast else "float32"
        return f"{sum(param.numel() for param in params):,} parameters in {len(params):,} tensors, {dtype}"


# Models #


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int, linear: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.proj = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(torch.nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(self, width: int, layers: int, vocabulary: int, length: int, linear: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList([Block(width, max(width // 128, 1), linear) for _ in range(layers)])
        self.norm, self.head = torch.nn.LayerNorm(width), linear(width, vocabulary, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch[:, :-1]) + self.places.weight[: batch.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), batch[:, 1:].flatten())


class ManyTensors(torch.nn.Module):
    """A chain of small layers, two tensors each: almost no arithmetic, so what is left is the cost of each tensor."""

    def __init__(self, num_layers: int, width: int, linear: type[torch.nn.Linear]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([linear(width, width) for _ in range(num_layers)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = batch + 0.01 * layer(batch)
        return batch.square().mean()


def gpt(device: torch.device, *, is_tiny: bool) -> Setup:
    width, layers, vocabulary, length, rows = (32, 2, 64, 16, 2) if is_tiny else (2_048, 24, 32_000, 1_024, 4)

    def batch() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(vocabulary, (rows, length + 1), generator=generator).to(device)

    return Setup(
        device,
        lambda linear: GPT(width, layers, vocabulary, length, linear),
        batch,
        autocast=True,
        bucket_mb=0.04 if is_tiny else 25.0,
    )


def many_tensors(device: torch.device, *, is_tiny: bool) -> Setup:
    num_layers, width = (10, 8) if is_tiny else (1_000, 64)

    def batch() -> torch.Tensor:
        return torch.randn(32, width, generator=torch.Generator().manual_seed(1)).to(device)

    return Setup(
        device,
        lambda linear: ManyTensors(num_layers, width, linear),
        batch,
        autocast=False,
        bucket_mb=0.001 if is_tiny else 25.0,
    )


# Systems #


class Step:
    """One system, ready to train.

    Args:
        call: what computes the loss, the wrapper for instance.
        update: what follows backward: the optimizer and the clearing of gradients.
        close: undoes what building has left in the process.
    """

    def __init__(
        self,
        setup: Setup,
        call: torch.nn.Module,
        update: Callable[[], object],
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._setup, self._call, self._update, self.close = setup, call, update, close
        self._batch = setup.batch()

    def compute(self) -> None:
        """Forward and backward alone. Of bare torch only."""
        self._setup.loss(self._call, self._batch).backward()
        self._call.zero_grad(set_to_none=True)

    def run(self) -> torch.Tensor:
        """Take one step; return its loss, on the device."""
        loss = self._setup.loss(self._call, self._batch)
        loss.backward()
        self._update()
        return loss.detach()


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def bare(setup: Setup) -> Step:
    module = setup.module()
    return Step(setup, module, stepping(adamw(module)))


def init_group(device: torch.device, folder: str, *, rank: int, size: int) -> None:
    """Make the default process group: NCCL on GPUs, gloo elsewhere. The ranks share the folder."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    on_gpu = {"backend": "nccl", "device_id": device} if device.index is not None else {}
    backend = {"backend": "nccl" if device.type == "cuda" else "gloo"}
    dist.init_process_group(**{**backend, **on_gpu}, store=store, rank=rank, world_size=size)


def group_of_one(device: torch.device) -> Callable[[], None]:
    """Make the default process group of this process alone, unless there is one; return what ends it."""
    if dist.is_initialized():
        return lambda: None
    folder = tempfile.TemporaryDirectory()
    init_group(device, folder.name, rank=0, size=1)

    def close() -> None:
        dist.destroy_process_group()
        folder.cleanup()

    return close


def torch_ddp(setup: Setup) -> Step:
    close = group_of_one(setup.device)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(
            setup.module(), gradient_as_bucket_view=True, bucket_cap_mb=setup.bucket_mb
        )
        return Step(setup, ddp, stepping(adamw(ddp)), close)
    except BaseException:
        close()
        raise


def ours(
    *,
    linear: type[torch.nn.Linear] = torch.nn.Linear,
    has_plain_optimizer: bool = False,
    has_group: bool = False,
    **switches: object,
) -> Callable[[Setup], Step]:
    def build(setup: Setup) -> Step:
        end_group = group_of_one(setup.device) if has_group else lambda: None
        config = mb.DistributedDataParallelConfig(bucket_cap_mb=setup.bucket_mb, **switches)
        ddp = mb.DistributedDataParallel(setup.module(linear), config)
        optimizer = adamw(ddp)
        stepped = stepping(optimizer if has_plain_optimizer else mb.DistributedOptimizer(optimizer, ddp))

        def close() -> None:
            ddp.detach()
            end_group()

        return Step(setup, ddp, stepped, close)

    return build


def megatron(setup: Setup) -> Step:
    """The wrapper of the megatron-core wheel; its gradients are in ``main_grad``, so they are shown to the optimizer."""
    if setup.device.type == "cpu":
        raise ImportError("Megatron's wrapper makes its buffers on a CUDA device")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    end_group = group_of_one(setup.device)

    def close() -> None:
        parallel_state.destroy_model_parallel()
        end_group()

    try:
        parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=int(setup.bucket_mb * 2**20 / 4)
        )
        ddp = DistributedDataParallel(config, ddp_config, setup.module())
        optimizer = adamw(ddp)

        def update() -> None:
            ddp.finish_grad_sync()
            for param in ddp.parameters():
                param.grad = param.main_grad
            optimizer.step()
            optimizer.zero_grad()
            ddp.zero_grad_buffer()

        return Step(setup, ddp, update, close)
    except BaseException:
        close()
        raise


SYSTEMS: dict[str, Callable[[Setup], Step]] = {
    "bare torch": bare,
    "torch DDP": torch_ddp,
    "megatron-core DDP": megatron,
    "megabucket, all-reduce, plain AdamW": ours(has_plain_optimizer=True),
    "megabucket, all-reduce, DistributedOptimizer": ours(),
    "megabucket, reduce-scatter": ours(use_distributed_optimizer=True),
    "megabucket, reduce-scatter, in a process group": ours(use_distributed_optimizer=True, has_group=True),
    "megabucket, reduce-scatter, fused linears": ours(use_distributed_optimizer=True, linear=FusedLinear),
    "megabucket, all-reduce, nothing asked": ours(
        has_plain_optimizer=True, fence=False, nonfinite_gradients="allow", check_model_changes=False
    ),
}
