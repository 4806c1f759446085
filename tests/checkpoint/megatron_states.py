"""Real states of megatron-core's DistributedOptimizer, made on the CPU: ``python megatron_states.py DIRECTORY``.

A process of its own, because Megatron keeps its groups in globals. Each case is trained on two gloo ranks; the first one writes
the state in bucket space and, beside it, Megatron's own main parameters and moments by name, taken from its shards, and the
weights some steps later.

Megatron makes its buffers on "the current CUDA device" and tells dtypes by the names of their CUDA types. While it builds, both
answers are replaced; nothing of it is replaced while it trains or saves.
"""

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

SHAPES = {"embed": (50, 8), "norm": (8,), "up": (8, 33), "scale": (1,), "down": (33, 8), "head": (50, 8)}
CASES = {
    "float32, one bucket": {"dtype": torch.float32},
    "float32, buckets, shared": {"dtype": torch.float32, "bucket_size": 300, "shared": ("embed", "up")},
    "bfloat16, buckets": {"dtype": torch.bfloat16, "bucket_size": 300},
    "bfloat16, float32 gradients": {
        "dtype": torch.bfloat16,
        "bucket_size": 100,
        "fp32_grads": True,
        "float32_params": ("norm", "scale"),
    },
}
STEPS = 3
LATER = 5
RANKS = 2


class Weights(torch.nn.Module):
    """Parameters by name, and a frozen one; the loss is a polynomial of them."""

    def __init__(self, dtype, float32_params=(), shared=(), **_):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator).to(torch.float32 if name in float32_params else dtype)
            self.register_parameter(name, torch.nn.Parameter(values))
            if name in shared:
                self.get_parameter(name).shared_embedding = True
        self.frozen = torch.nn.Parameter(torch.randn(4, generator=generator).to(dtype), requires_grad=False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        self.seen += 1
        return sum(
            (param.float() * torch.randn(param.shape, generator=generator)).square().sum()
            for param in self.parameters()
            if param.requires_grad
        )


@contextmanager
def on_cpu():
    make_tensor, type_of = torch.tensor, torch.Tensor.type

    def tensor(*args, **kwargs):
        return make_tensor(*args, **{**kwargs, "device": "cpu"})

    def type_as_on_cuda(self, *args, **kwargs):
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(torch.Tensor, "type", type_as_on_cuda),
    ):
        yield


def build(module, *, bucket_size=None, fp32_grads=False, dtype, **_):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer import TransformerConfig

    config = DistributedDataParallelConfig(
        overlap_grad_reduce=bucket_size is not None,
        use_distributed_optimizer=True,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=fp32_grads,
    )
    group = parallel_state.get_data_parallel_group()
    transformer = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    with on_cpu():
        ddp = DistributedDataParallel(transformer, config, module)
        trained = [param for param in module.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in trained if param.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(groups, lr=0.05),
            OptimizerConfig(optimizer="adam", clip_grad=0.0, bf16=dtype == torch.bfloat16, use_distributed_optimizer=True),
            None,
            lambda *_: None,
            model_chunks=[ddp],
            per_model_buffers={0: ddp.buffers},
            data_parallel_group=group,
            data_parallel_group_gloo=group,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
    optimizer.grad_stats_parallel_group = optimizer.tp_group = group
    return ddp, optimizer


def train(ddp, optimizer, steps):
    for step in steps:
        ddp.zero_grad_buffer()
        ddp(step).backward()
        ddp.finish_grad_sync()
        assert optimizer.step()[0]


def shards_by_name(module, optimizer):
    """What Megatron holds on this rank: ranges of flat parameters with its own main values and moments."""
    names = {param: name for name, param in module.named_parameters()}
    shards = []
    for of_buffer in optimizer.gbuf_ranges:
        for of_dtype in of_buffer.values():
            for bucket in of_dtype:
                for param, ranges in bucket["param_map"].items():
                    group, position = optimizer.model_param_group_index_map[param]
                    main = optimizer.optimizer.param_groups[group]["params"][position]
                    state = optimizer.optimizer.state[main]
                    values = {"param": main.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                    shards.append((names[param], ranges["param"].start, {key: value.clone() for key, value in values.items()}))
    return shards


def whole(shards):
    """The shards of all ranks as flat tensors by name; nan where nobody owns an element."""
    found = {name: {} for name in SHAPES}
    for name, start, values in shards:
        for key, value in values.items():
            full = found[name].setdefault(key, torch.full((torch.Size(SHAPES[name]).numel(),), torch.nan))
            full[start : start + value.numel()] = value
    return found


def rank_main(rank, directory):
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    for index, case in enumerate(CASES.values()):
        module = Weights(**case)
        ddp, optimizer = build(module, **case)
        train(ddp, optimizer, range(STEPS))
        shards = [None] * RANKS
        dist.all_gather_object(shards, shards_by_name(module, optimizer))
        found = {
            "param_state": optimizer.get_parameter_state_dp_zero(),
            "step": optimizer.state_dict()["optimizer"]["param_groups"][0]["step"],
            "weights": {name: tensor.clone() for name, tensor in module.state_dict().items()},
            "own": whole([shard for of_rank in shards for shard in of_rank]),
        }
        train(ddp, optimizer, range(STEPS, LATER))
        if rank == 0:
            torch.save({**found, "later": dict(module.state_dict())}, directory / f"{index}.pt")
    dist.destroy_process_group()


def quietly(rank, directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's: no Transformer Engine, no apex, deprecated names of torch
        rank_main(rank, directory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(quietly, (Path(sys.argv[1]),), nprocs=RANKS)
