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

import pytest
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
        first: the step to begin with; our side loads the checkpoint in ``root`` before it, if that is not 0.
        root: where our side saves a checkpoint at the end.
    """

    sizes: Mapping[str, int]
    transformer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    is_tied: bool = False
    dtype: torch.dtype = torch.float32
    num_microbatches: int = 2
    steps: int = STEPS
    first: int = 0
    root: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of one rank: norms and losses by step, weights by chunk and name, the learning rates at the end; and, of our side, the
    place of each weight in the whole model: name, shape and offset."""

    norms: list[float]
    losses: list[list[float]]
    weights: dict[str, torch.Tensor]
    rates: list[float]
    places: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


def train(rank: Rank, side: str, cell: Cell) -> Outcome:
    """Train on ``"our"`` side or on ``"their"`` side."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        return _train(rank, side == "our", cell)


def _train(rank: Rank, is_ours: bool, cell: Cell) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    import megabucket as mb
    from megabucket.errors import ConfigError

    with mock.patch.multiple(parallel_state, HAVE_EINOPS=True, einops=Einops, create=True):
        parallel_state.initialize_model_parallel(**cell.sizes, create_gloo_process_groups=False)
    moe_utils.te_general_gemm = None  # undefined in the wheel without Transformer Engine
    token_dispatcher.maybe_move_tensor_to_cpu = to_numpy
    config, chunks, optimizer = built(is_ours, cell)
    scheduler = scheduler_of(optimizer)
    try:
        if cell.first:
            loaded = mb.load_checkpoint(cell.root, chunks[0].wrapper, optimizer.optimizer, schedulers=scheduler)
            assert loaded.step == scheduler.num_steps == cell.first
        norms, losses = trained(is_ours, cell, config, chunks, optimizer, scheduler)
        if is_ours and cell.root:
            mb.save_checkpoint(cell.root, chunks[0].wrapper, optimizer.optimizer, step=cell.steps, schedulers=scheduler)
        if is_ours and {"tensor_model_parallel_size", "pipeline_model_parallel_size"} & cell.sizes.keys():
            with pytest.raises(ConfigError, match="this format has not been compared with Megatron's"):
                optimizer.sharded_state_dict({})
        if cell.ddp.get("overlap_param_gather"):
            for chunk in chunks:
                chunk.disable_forward_pre_hook()
        weights = {
            f"{index}.{name}": param.detach().clone()
            for index, chunk in enumerate(chunks)
            for name, param in chunk.module.named_parameters()
        }
        places = {
            f"{index}.{name}": (own.global_name, own.global_shape, own.offset)
            for index, chunk in enumerate(chunks if is_ours else ())
            for name, own in chunk.wrapper.identities.items()
        }
        return Outcome(norms, losses, weights, sorted({group["lr"] for group in optimizer.param_groups}), places)
    finally:
        for chunk in chunks if is_ours else ():
            chunk.wrapper.detach()
        parallel_state.destroy_model_parallel()


def built(is_ours: bool, cell: Cell) -> tuple[Any, list[Any], Any]:
    """Return Megatron's config, the wrapped chunks and their optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron_side import on_cpu

    from megabucket.integrations import megatron as adapter

    wrapper = adapter.DistributedDataParallel if is_ours else DistributedDataParallel
    make_optimizer = adapter.get_megatron_optimizer if is_ours else get_megatron_optimizer
    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, "bucket_size": BUCKET_NUMEL, **cell.ddp}
    options["num_distributed_optimizer_instances"] = cell.sizes.get("num_distributed_optimizer_instances", 1)
    with on_cpu():
        config = transformer_config(cell)
        chunks = [
            wrapper(config, DistributedDataParallelConfig(**options), module, disable_bucketing=index > 0)
            for index, module in enumerate(gpt_chunks(config, cell))
        ]
        optimizer_config = OptimizerConfig(
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE / 10,
            weight_decay=0.1,
            clip_grad=CLIP,
            use_distributed_optimizer=options.get("use_distributed_optimizer", False),
            overlap_param_gather=options.get("overlap_param_gather", False),
            bf16=cell.dtype == torch.bfloat16,
            params_dtype=cell.dtype,
        )
        optimizer = make_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    # As train() of Megatron-LM sets them.
    no_syncs, starts, gathers = zip(
        *((chunk.no_sync, chunk.start_grad_sync, chunk.start_param_sync) for chunk in chunks), strict=True
    )
    config.no_sync_func = list(no_syncs) if len(chunks) > 1 else no_syncs[0]
    if len(chunks) > 1:
        config.grad_sync_func = list(starts)  # align_grad_reduce
    if options.get("align_param_gather"):
        config.param_sync_func = list(gathers) if len(chunks) > 1 else gathers[0]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return config, chunks, optimizer


def scheduler_of(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 10,
        lr_warmup_steps=2,
        lr_decay_steps=STEPS,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=STEPS,
        wd_incr_style="linear",
    )


def trained(
    is_ours: bool, cell: Cell, config: Any, chunks: list[Any], optimizer: Any, scheduler: Any
) -> tuple[list[float], list[list[float]]]:
    """Train as ``train_step`` of Megatron-LM does; return norms and losses by step."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron_side import on_cpu, step_on_cpu

    norms, losses = [], []
    for step in range(cell.first, cell.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        dp_rank = parallel_state.get_data_parallel_rank()
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
    return norms, losses


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
    """Yield a rank's part of the step's batch, which is the same for any number of ranks."""
    for index in range(dp_rank * num_microbatches, (dp_rank + 1) * num_microbatches):
        generator = torch.Generator().manual_seed(1000 * step + index)
        yield torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


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
