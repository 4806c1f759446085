"""Megatron-Core's own schedule and ``finalize_model_grads`` drive the adapter, and end with the bits of Megatron's own wrapper.

On a CPU Megatron's schedule needs a shim: ``megatron_side.on_cpu``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_ranks import NUM_EXPERTS, NUM_RANKS, Moe, groups_of, own_experts, tokens_of
from pool import Rank, WorkerPool

pytestmark = [pytest.mark.dist, pytest.mark.nightly]  # Megatron takes its time to import, on each rank

STEPS = 8
LEARNING_RATE = 3e-3
BUCKET_NUMEL = 400
CLIP = 0.05

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def thresholds() -> list[float]:
    """Return what to clip at: in every other step less than half of the norm."""
    return [CLIP if step % 2 else 0.0 for step in range(STEPS)]


def train(
    rank: Rank, side: str, expert_parallel: int, dtype: torch.dtype, num_microbatches: int, fields: dict[str, Any]
) -> Outcome:
    """Train in Megatron's loop. ``expert_parallel`` 0: no parameter is marked as an expert's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        return {"ours": train_ours, "theirs": train_theirs}[side](rank, expert_parallel, dtype, num_microbatches, fields)


def train_ours(rank: Rank, expert_parallel: int, dtype: torch.dtype, num_microbatches: int, fields: dict[str, Any]) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from megabucket.integrations.megatron import DistributedDataParallel, DistributedOptimizer

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=max(expert_parallel, 1), create_gloo_process_groups=False
    )
    transformer, options = transformer_config(fields)
    module, groups = scheduled_model(rank, expert_parallel, dtype, transformer)
    ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(**options), module)
    config = OptimizerConfig(clip_grad=1.0, use_distributed_optimizer=options.get("use_distributed_optimizer", False))
    optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), config, [ddp])

    def update(threshold: float) -> float:
        config.clip_grad = threshold
        updated, norm, _ = optimizer.step()
        assert updated
        return norm

    try:
        norms = drive(rank, ddp, transformer, num_microbatches, update, optimizer.zero_grad)
        ddp.disable_forward_pre_hook()
        return norms, weights_of(module)
    finally:
        ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)


def train_theirs(
    rank: Rank, expert_parallel: int, dtype: torch.dtype, num_microbatches: int, fields: dict[str, Any]
) -> Outcome:
    from megatron_side import MegatronSide

    transformer, options = transformer_config(fields)
    module, groups = scheduled_model(rank, expert_parallel, dtype, transformer)
    is_sharded = options.pop("use_distributed_optimizer", False)
    side = MegatronSide(
        module,
        expert_parallel=max(expert_parallel, 1),
        learning_rate=LEARNING_RATE,
        is_sharded=is_sharded,
        transformer=transformer,
        **options,
    )
    try:
        norms = drive(rank, side.ddp, transformer, num_microbatches, side.update, side.optimizer.zero_grad)
        if options.get("overlap_param_gather"):
            side.ddp.start_param_sync(force_sync=True)
        return norms, weights_of(module)
    finally:
        side.close()
        for group in groups:
            dist.destroy_process_group(group)


def transformer_config(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return Megatron's config of a model, and the fields of its DDP config."""
    from megatron.core.transformer import TransformerConfig

    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, "bucket_size": BUCKET_NUMEL, **fields}
    per_token = options.pop("calculate_per_token_loss", False)
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=per_token)
    return config, options


def scheduled_model(
    rank: Rank, expert_parallel: int, dtype: torch.dtype, transformer: Any
) -> tuple[torch.nn.Module, list[dist.ProcessGroup]]:
    """Return a model with what Megatron's schedule asks of one, and the groups that were made for it."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class Scheduled(MegatronModule):
        model_type = ModelType.encoder_or_decoder

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(transformer)
            self.model = model

        def set_input_tensor(self, tensors: Any) -> None:
            """Nothing: there is no earlier pipeline stage."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)

    if expert_parallel == 0:
        model, groups = Moe(range(NUM_EXPERTS)), []
        for param in model.parameters():
            param.allreduce = True
    else:
        exchanging, same = groups_of(rank.index, expert_parallel, rank.size)
        model, groups = Moe(own_experts(rank.index, expert_parallel), exchanging), [exchanging, same]
    return Scheduled(model.to(dtype)), groups


def drive(
    rank: Rank,
    ddp: Any,
    transformer: Any,
    num_microbatches: int,
    update: Callable[[float], float],
    zero_grad: Callable[[], None],
) -> list[float]:
    """Train as ``train_step`` of Megatron-LM does, and return the norms."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron_side import on_cpu

    transformer.no_sync_func = ddp.no_sync
    transformer.finalize_model_grads_func = finalize_model_grads

    def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        inputs, targets = next(batches)

        def loss_of(output: torch.Tensor) -> Any:
            if transformer.calculate_per_token_loss:
                total = torch.nn.functional.cross_entropy(output, targets, reduction="sum")
                return total, torch.tensor(len(targets), dtype=torch.int), {"loss": total.detach()}
            loss = torch.nn.functional.cross_entropy(output, targets)
            return loss, {"loss": loss.detach()}

        return model(inputs), loss_of

    norms = []
    for step, threshold in enumerate(thresholds()):
        ddp.zero_grad_buffer()
        zero_grad()
        with on_cpu():
            losses = forward_backward_no_pipelining(
                forward_step_func=forward_step,
                data_iterator=iter([tokens_of(rank.index, 100 * number + step) for number in range(num_microbatches)]),
                model=[ddp],
                num_microbatches=num_microbatches,
                seq_length=1,
                micro_batch_size=1,
            )
        assert len(losses) == num_microbatches
        norms.append(update(threshold))
    return norms


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.fixture(scope="module")
def pool_of_two():
    pool = WorkerPool(num_ranks=2)
    yield pool
    pool.close()


def assert_equal(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for (norms, weights), (their_norms, their_weights) in zip(ours, theirs, strict=True):
        assert norms == their_norms
        assert min(norms) > 2 * CLIP
        assert weights.keys() == their_weights.keys()
        assert [name for name in weights if not torch.equal(weights[name], their_weights[name])] == []


SHARDED = {"use_distributed_optimizer": True}
GATHERING = SHARDED | {"overlap_param_gather": True}
BLOCKING = {"overlap_grad_reduce": False}
PER_TOKEN = {"calculate_per_token_loss": True}


@pytest.mark.parametrize(
    ("expert_parallel", "dtype", "num_microbatches", "fields"),
    [
        (0, torch.float32, 1, SHARDED),
        (0, torch.bfloat16, 3, GATHERING),
        (0, torch.float32, 3, SHARDED | PER_TOKEN),
        (2, torch.float32, 1, {}),
        (2, torch.float32, 3, SHARDED),
        (2, torch.bfloat16, 1, SHARDED | BLOCKING),
        (4, torch.float32, 2, GATHERING),
    ],
    ids=str,
)
def test_four_ranks_in_megatrons_schedule_end_with_megatrons_bits(pool, expert_parallel, dtype, num_microbatches, fields):
    arguments = (expert_parallel, dtype, num_microbatches, fields)

    ours = pool.run(train, "ours", *arguments, ranks=NUM_RANKS)
    theirs = pool.run(train, "theirs", *arguments, ranks=NUM_RANKS)

    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("expert_parallel", "dtype", "num_microbatches", "fields"),
    [
        (0, torch.float32, 1, {}),
        (0, torch.bfloat16, 3, SHARDED),
        (2, torch.float32, 2, GATHERING),
        (1, torch.float32, 1, SHARDED),
    ],
    ids=str,
)
def test_two_ranks_in_megatrons_schedule_end_with_megatrons_bits(pool_of_two, expert_parallel, dtype, num_microbatches, fields):
    arguments = (expert_parallel, dtype, num_microbatches, fields)

    ours = pool_of_two.run(train, "ours", *arguments, ranks=2)
    theirs = pool_of_two.run(train, "theirs", *arguments, ranks=2)

    assert_equal(ours, theirs)


def resume_and_scale(rank: Rank) -> None:
    """Save between two steps, step, load, and step again: with a loss scale, which a skipped step lowers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        from megabucket.integrations.megatron import DistributedDataParallel, DistributedOptimizer

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        transformer, _ = transformer_config({})
        module = torch.nn.Linear(8, 8).half()
        ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(use_distributed_optimizer=True), module)
        config = OptimizerConfig(fp16=True, initial_loss_scale=1024.0, hysteresis=1, clip_grad=0.0)
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), config, ddp)

    def step(factor: float) -> bool:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        optimizer.scale_loss(ddp(torch.full((2, 8), 0.5).half()).float().mean() * factor).backward()
        ddp.finish_grad_sync()
        return optimizer.step()[0]

    try:
        assert step(1.0)
        assert not step(1e30 if rank.index else 1.0)  # overflows on one rank
        assert optimizer.get_loss_scale().item() == 512.0
        saved = {
            "model": {name: value.clone() for name, value in ddp.state_dict().items()},
            "optimizer": optimizer.state_dict(),
        }
        assert step(1.0)
        once = weights_of(module)
        assert not torch.equal(once["weight"], saved["model"]["weight"])
        assert not step(float("inf"))
        ddp.load_state_dict(saved["model"])
        optimizer.reload_model_params()
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.get_loss_scale().item() == 512.0
        assert step(1.0)
        assert all(torch.equal(value, once[name]) for name, value in weights_of(module).items())
    finally:
        ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


def test_a_step_after_loading_equals_the_one_after_saving_and_overflows_lower_the_scale(pool_of_two):
    pool_of_two.run(resume_and_scale, ranks=2)


def refusals(rank: Rank) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallelConfig

        from megabucket.errors import ConfigError
        from megabucket.integrations.megatron import _REFUSED_DDP, _TAKEN, config_from

    known = {*_TAKEN, *_REFUSED_DDP, "bucket_size", "check_for_nan_in_grad", "gradient_reduce_div_fusion"}
    assert known == set(vars(DistributedDataParallelConfig())), "each field is taken, refused or (div fusion) changes nothing"
    texts = []
    for name in _REFUSED_DDP:
        config = DistributedDataParallelConfig()
        setattr(config, name, 2 if isinstance(getattr(config, name), int) else "other")
        with pytest.raises(ConfigError) as caught:
            config_from(config)
        texts.append(f"{name} {caught.value}")
    return texts


def test_each_field_that_is_refused_is_named_with_the_reason(pool_of_two):
    (texts,) = pool_of_two.run(refusals, ranks=1)

    for text in texts:
        name = text.split()[0]
        assert f"DistributedDataParallelConfig: {name}=" in text
