"""Megatron's GPT model on a CPU, trained by Megatron's schedules under its model parallelism: by the wheel's own wrapper and
optimizer, or by the adapter.

Nothing of Megatron's is replaced but what ``megatron_side.on_cpu`` says, and its norm layer, which exists for CUDA alone where
the sequence is cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from pool import Rank

VOCABULARY, SEQUENCE, BATCH = 32, 8, 2
LEARNING_RATE = 3e-3
BUCKET_NUMEL = 1500
STEPS = 6
CLIP = 0.3


@dataclass(frozen=True)
class Cell:
    """What to train.

    Args:
        sizes: of ``parallel_state.initialize_model_parallel``.
        transformer: fields of Megatron's ``TransformerConfig``.
        ddp: fields of Megatron's ``DistributedDataParallelConfig``.
        is_tied: whether the output layer has the weight of the embedding.
    """

    sizes: Mapping[str, int]
    transformer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    is_tied: bool = False
    dtype: torch.dtype = torch.float32
    num_microbatches: int = 2
    steps: int = STEPS


@dataclass(frozen=True)
class Outcome:
    """Of one rank: norms and losses by step, weights by chunk and name, and the learning rates at the end."""

    norms: list[float]
    losses: list[list[float]]
    weights: dict[str, torch.Tensor]
    rates: list[float]


def train(rank: Rank, side: str, cell: Cell) -> Outcome:
    """Train on ``"our"`` side or on ``"their"`` side."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        return _train(rank, side == "our", cell)


def _train(rank: Rank, is_ours: bool, cell: Cell) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron_side import on_cpu, step_on_cpu

    from megabucket.integrations import megatron as adapter

    with mock.patch.multiple(parallel_state, HAVE_EINOPS=True, einops=Einops, create=True):
        parallel_state.initialize_model_parallel(**cell.sizes, create_gloo_process_groups=False)
    moe_utils.te_general_gemm = None  # undefined in the wheel without Transformer Engine
    token_dispatcher.maybe_move_tensor_to_cpu = to_numpy
    wrapper = adapter.DistributedDataParallel if is_ours else DistributedDataParallel
    make_optimizer = adapter.get_megatron_optimizer if is_ours else get_megatron_optimizer
    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, "bucket_size": BUCKET_NUMEL, **cell.ddp}
    options["num_distributed_optimizer_instances"] = cell.sizes.get("num_distributed_optimizer_instances", 1)
    is_sharded, is_bf16 = options.get("use_distributed_optimizer", False), cell.dtype == torch.bfloat16
    with on_cpu():
        config = transformer_config(cell)
        modules = gpt_chunks(config, cell)
        chunks = [
            wrapper(config, DistributedDataParallelConfig(**options), module, disable_bucketing=index > 0)
            for index, module in enumerate(modules)
        ]
        optimizer_config = OptimizerConfig(
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE / 10,
            weight_decay=0.1,
            clip_grad=CLIP,
            use_distributed_optimizer=is_sharded,
            overlap_param_gather=options.get("overlap_param_gather", False),
            bf16=is_bf16,
            params_dtype=cell.dtype,
        )
        optimizer = make_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 10,
        lr_warmup_steps=2,
        lr_decay_steps=cell.steps,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=cell.steps,
        wd_incr_style="linear",
    )
    no_syncs, starts = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    config.no_sync_func = no_syncs if len(chunks) > 1 else no_syncs[0]
    if len(chunks) > 1:
        config.grad_sync_func = starts  # align_grad_reduce
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    dp_rank = parallel_state.get_data_parallel_rank()
    norms, losses = [], []
    try:
        for step in range(cell.steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            with on_cpu():
                found = get_forward_backward_func()(
                    forward_step_func=forward_step(config),
                    data_iterator=[batches(step, dp_rank, cell.num_microbatches) for _ in chunks],
                    model=chunks,
                    num_microbatches=cell.num_microbatches,
                    seq_length=SEQUENCE,
                    micro_batch_size=BATCH,
                )
            losses.append([float(one["loss"]) for one in found])
            if is_ours:
                updated, norm, _ = optimizer.step()
                assert updated
            else:
                norm = step_on_cpu(optimizer)
            scheduler.step(1)
            norms.append(norm)
        if options.get("overlap_param_gather"):
            for chunk in chunks:
                chunk.disable_forward_pre_hook()
        weights = {
            f"{index}.{name}": param.detach().clone()
            for index, module in enumerate(modules)
            for name, param in module.named_parameters()
        }
        return Outcome(norms, losses, weights, sorted({group["lr"] for group in optimizer.param_groups}))
    finally:
        if is_ours:
            for chunk in chunks:
                chunk.wrapper.detach()
        parallel_state.destroy_model_parallel()


class Einops:
    """In place of a package that Megatron uses once, for the groups of optimizer instances."""

    @staticmethod
    def rearrange(ranks: Any, pattern: str, *, l: int, s: int, u: int) -> Any:  # noqa: E741 - their names
        assert pattern == "(l s u) -> (l u) s"
        return ranks.reshape(l, s, u).transpose(0, 2, 1).reshape(l * u, s)


def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return counts of tokens as Megatron does with those on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def transformer_config(cell: Cell) -> Any:
    from megatron.core.transformer import TransformerConfig

    names = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    }
    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "batch_p2p_comm": False,
            "pipeline_dtype": cell.dtype,
            "params_dtype": cell.dtype,
            "bf16": cell.dtype == torch.bfloat16,
            **{name: size for name, size in cell.sizes.items() if name in names},
            **cell.transformer,
        }
    )


def gpt_chunks(config: Any, cell: Cell) -> list[torch.nn.Module]:
    """Return this rank's parts of a GPT model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    pp_rank, pp_size = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size
    chunks: list[torch.nn.Module] = []
    for index in range(num_chunks):
        torch.manual_seed(17)
        num_layers = config.num_layers // (pp_size * num_chunks)
        made = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=Norm),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=pp_rank == index == 0,
            post_process=pp_rank == pp_size - 1 and index == num_chunks - 1,
            share_embeddings_and_output_weights=cell.is_tied,
            vp_stage=index if num_chunks > 1 else None,
        )
        chunks.append(Float16Module(config, made) if config.bf16 else made)
    return chunks


class Norm(torch.nn.LayerNorm):
    """A layer norm that marks its parameters where the sequence is cut, as those of Megatron for CUDA."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def batches(step: int, dp_rank: int, num_microbatches: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return iter(torch.randint(VOCABULARY, (num_microbatches, BATCH, SEQUENCE + 1), generator=generator))


def forward_step(config: Any) -> Callable[..., Any]:
    def step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        tokens = next(data)
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

        def loss_of(losses: torch.Tensor) -> Any:
            if config.calculate_per_token_loss:
                total = losses.float().sum()
                return total, torch.tensor(losses.numel(), dtype=torch.int), {"loss": total.detach()}
            loss = losses.float().mean()
            return loss, {"loss": loss.detach()}

        return output, loss_of

    return step
