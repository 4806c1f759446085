"""torchtitan's Llama, plan and trainer with our wrapper in place of fully_shard; every rank runs it, the first prints JSON.

python -m torch.distributed.run --nproc-per-node 4 titan_ranks.py RUN_FOLDER

Replaced, because it is not there on a CPU:

* the packages triton, datasets, wandb and tensorboard, which torchtitan imports and a step does not call, by empty ones
* flex attention, whose backward needs a GPU, by torchtitan's ScaledDotProductAttention
* Trainer.__init__ (a device, a tokenizer, data from the network), by one that makes only what train_step() reads; metrics and
  the checkpointer are objects that do nothing
* in torchtitan's own fully_shard run, which is compared: sums instead of PREMUL_SUM, which gloo lacks

spmd_backend is "partial_dtensor": DTensors for tensor parallelism alone.
"""

import contextlib
import dataclasses
import importlib.machinery
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._inductor.compile_fx  # before triton is replaced
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

import megabucket as mb
from megabucket.errors import ConfigError


class Empty(types.ModuleType):
    """A package with every name; each is a class or decorator that does nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(
            name, (), {"__new__": lambda _, *given, **__: given[0] if given and callable(given[0]) else lambda made: made}
        )


class EmptyPackages:
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.startswith(("triton", "datasets", "wandb", "torch.utils.tensorboard"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, EmptyPackages())  # type: ignore[arg-type]
find_device = torch._utils._get_available_device_type
torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks once, and takes "cuda" if there is none
import torchtitan.models.llama3.parallelize as plan  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

torch._utils._get_available_device_type = find_device

WIDTH, VOCABULARY, TOKENS, STEPS, CLIP, LR = 32, 64, 16, 12, 0.2, 1e-2
SCHEDULE = {"warmup_steps": 2, "decay_ratio": 0.8, "min_lr_factor": 0.1}


def model_config() -> llama3.Llama3Model.Config:
    rope = ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=500000, scaling="llama")
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64}
    layers = llama3._build_llama3_layers(**sizes, fuse_qkv=False, rope=rope, attn_backend="flex")
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    embedding = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT)
    head = Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH))
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT)
    return llama3.Llama3Model.Config(
        dim=WIDTH, vocab_size=VOCABULARY, tok_embeddings=embedding, norm=norm, lm_head=head, layers=layers
    )


def make_config(microbatches: int) -> Trainer.Config:
    return Trainer.Config(
        model_spec=dataclasses.replace(llama3.model_registry("debugmodel"), model=model_config()),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=dataclasses.replace(default_adamw(lr=LR), implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(**SCHEDULE),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=TOKENS,
            steps=STEPS,
            max_norm=CLIP,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
    )


class OnCpu(Trainer):
    """torchtitan's trainer, with fully_shard; only what train_step() reads is made."""

    def __init__(self, config: Trainer.Config, weights: dict[str, torch.Tensor], microbatches: int) -> None:
        self.config, self.device, self.model_config = config, torch.device("cpu"), config.model_spec.model
        self.parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.parallel_dims.build_mesh()
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        self.model_config.update_from_config(config=config)
        with torch.device("meta"):
            model = self.model_config.build()
        model = self.parallelize(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_states()
            for name, param in model.named_parameters():
                param.copy_(distribute_tensor(weights[name], param.device_mesh, param.placements, src_data_rank=None))
        self.model_parts = [self.wrap(model)]
        self.loss_fn = config.loss.build(compile_config=config.compile)
        self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches = microbatches, 1
        self.optimizers = self.make_optimizers()
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=STEPS)
        self.step = self.ntokens_seen = 0
        self.metrics_processor = self.checkpointer = self  # of which train_step() calls the two methods below
        self.train_context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims, spmd_typechecking=False)
        self.fwd_bwd_fn = self._forward_backward_body

    def should_log(self, _: int) -> bool:
        return False

    def maybe_wait_for_staging(self) -> None:
        pass

    def parallelize(self, model: torch.nn.Module) -> torch.nn.Module:
        config = self.config
        parts = {"parallelism": config.parallelism, "training": config.training, "compile_config": config.compile}
        model = config.model_spec.parallelize_fn(
            model, parallel_dims=self.parallel_dims, ac_config=None, dump_folder="", **parts
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def make_optimizers(self) -> Any:
        return self.config.optimizer.build(model_parts=self.model_parts)


class Ours(OnCpu):
    """The same trainer with our wrapper: all that has to be changed."""

    is_sharded = True

    def parallelize(self, model: torch.nn.Module) -> torch.nn.Module:
        fully_shard, plan.apply_fsdp_to_decoder = plan.apply_fsdp_to_decoder, lambda *_, **__: None
        try:
            return super().parallelize(model)
        finally:
            plan.apply_fsdp_to_decoder = fully_shard

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        # The loss is divided by the tokens of all ranks: gradients are summed.
        config = mb.DistributedDataParallelConfig(
            use_distributed_optimizer=self.is_sharded, grad_reduction="sum", bucket_size=2000
        )
        return mb.DistributedDataParallel(model, config, process_group=self.parallel_dims.get_mesh("fsdp"))

    def make_optimizers(self) -> Any:
        (ddp,), optimizers = self.model_parts, super().make_optimizers()
        optimizers.optimizers = [mb.DistributedOptimizer(optimizers.optimizers, ddp)]
        optimizers.param_groups.clear()  # the container is an optimizer over whole parameters as well, which is refused
        self.norms: list[float] = []
        return optimizers

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        self.num_left -= 1
        with self.model_parts[0].no_sync() if self.num_left else contextlib.nullcontext():
            return super().forward_backward_step(**batch)

    def clip(self, _: object, max_norm: float, **__: Any) -> torch.Tensor:
        norm = self.optimizers.optimizers[0].clip_grad_norm_(max_norm)
        self.norms.append(float(norm))
        return norm

    def train_step(self, batches: Iterator[Any]) -> None:
        self.num_left = self.gradient_accumulation_steps
        clip, dist_utils.clip_grad_norm_ = dist_utils.clip_grad_norm_, self.clip
        try:
            super().train_step(batches)
        finally:
            dist_utils.clip_grad_norm_ = clip


def batches_of(step: int, microbatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens and labels of all ranks, by microbatch; some labels are not counted."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (microbatches, 4, TOKENS + 1), generator=generator)
    labels = text[:, :, 1:].clone()
    labels[:, 0, :5] = -100
    return list(zip(text[:, :, :-1], labels, strict=True))


def train(trainer: OnCpu, first: int, last: int) -> None:
    rank, microbatches = dist.get_rank() // 2, trainer.gradient_accumulation_steps
    own = slice(2 * rank, 2 * rank + 2)
    for step in range(first, last):
        trainer.train_step(iter([({"input": x[own]}, y[own]) for x, y in batches_of(step, microbatches)]))


def alone(
    make: Callable[[torch.nn.Module], list[torch.optim.Optimizer]], microbatches: int
) -> tuple[dict[str, Any], list[float]]:
    """Train torchtitan's model in one process with plain torch; return its weights, and the norms before clipping."""
    model = make_model()
    optimizers = make(model)
    schedules = LRSchedulersContainer.Config(**SCHEDULE).build(optimizers=optimizers, training_steps=STEPS)
    norms = []
    for step in range(STEPS):
        batches = batches_of(step, microbatches)
        num_tokens = sum((labels != -100).sum() for _, labels in batches)
        for tokens, labels in batches:
            logits = model(tokens).flatten(0, 1)
            (torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for optimizer in optimizers:
            optimizer.step()
        schedules.step()
        model.zero_grad()
    return model.state_dict(), norms


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    dist_utils.set_spmd_backend("partial_dtensor")
    model = model_config().build()
    with torch.no_grad():
        model.init_states()
    return model


def adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.1)]


def distance(trainer: OnCpu, reference: dict[str, Any], moved: float = 1.0) -> float:
    found = trainer.model_parts[0].state_dict()
    values = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return max(float((values[name] - weight).abs().max()) / moved for name, weight in reference.items())


def resumed(trainer: Ours, make: Callable[[], Ours], folder: Path) -> float:
    """Return the distance of a run that goes on from one through torch's state-dict API, after as many steps."""
    weights, state = get_state_dict(trainer.model_parts[0], trainer.optimizers.optimizers[0])
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder))
    second = make()
    weights, state = get_state_dict(second.model_parts[0], second.optimizers.optimizers[0])
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=str(folder))
    own = second.model_parts[0], second.optimizers.optimizers[0]
    set_state_dict(*own, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    second.lr_schedulers.load_state_dict(trainer.lr_schedulers.state_dict())
    train(trainer, STEPS, STEPS + 2)
    train(second, STEPS, STEPS + 2)
    pairs = zip(trainer.model_parts[0].parameters(), second.model_parts[0].parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


class WithMuon(Ours):
    """Muon over matrices, which tensor parallelism has cut: refused unless it is said to work on pieces."""

    works_on_pieces = False

    def make_optimizers(self) -> Any:
        (ddp,) = self.model_parts
        matrices = [param for name, param in ddp.named_parameters() if "layers" in name and param.ndim == 2]
        rest = [param for param in ddp.parameters() if all(param is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, LR)
        if self.works_on_pieces:
            muon.works_on_pieces = True
        optimizers = OnCpu.make_optimizers(self)
        optimizers.optimizers = [mb.DistributedOptimizer([muon, torch.optim.AdamW(rest, LR)], ddp)]
        optimizers.param_groups.clear()
        self.norms = []
        return optimizers


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    root, said = Path(sys.argv[1]), {}
    before = {name: value.clone() for name, value in make_model().state_dict().items()}
    for microbatches in (1, 3):
        reference, norms = alone(adamw, microbatches)
        moved = max(float((weight - before[name]).abs().max()) for name, weight in reference.items())
        theirs = OnCpu(make_config(microbatches), before, microbatches)
        train(theirs, 0, STEPS)
        said[f"fully_shard, {microbatches}"] = {"distance": distance(theirs, reference, moved)}
        for is_sharded in (True, False):
            Ours.is_sharded = is_sharded
            trainer = Ours(make_config(microbatches), before, microbatches)
            train(trainer, 0, STEPS)
            trainer.model_parts[0].check_replicas()
            said[f"{'sharded' if is_sharded else 'all-reduce'}, {microbatches}"] = {
                "distance": distance(trainer, reference, moved),
                "norms": max(abs(one / other - 1) for one, other in zip(trainer.norms, norms, strict=True)),
                "smallest norm": min(norms),
            }
            if is_sharded and microbatches == 1:
                said["resumed"] = resumed(trainer, lambda: Ours(make_config(1), before, 1), root / "checkpoint")
    try:
        WithMuon(make_config(1), before, 1)
    except ConfigError as refusal:
        said["Muon"] = str(refusal)
    WithMuon.works_on_pieces = True
    on_pieces = WithMuon(make_config(1), before, 1)
    train(on_pieces, 0, STEPS)
    on_pieces.model_parts[0].check_replicas()
    said["Muon on pieces"] = distance(on_pieces, before)
    if dist.get_rank() == 0:
        print("SAID " + json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
