"""Megatron-Core's own schedule and ``finalize_model_grads`` drive the adapter, and end with the bits of Megatron's own wrapper.

On a CPU Megatron's schedule needs a shim: ``megatron_side.on_cpu``. One rank is compared by day, several by night.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_ranks import NUM_EXPERTS, NUM_RANKS, Moe, groups_of, own_experts, tokens_of
from pool import Rank, WorkerPool

import megabucket as mb
from megabucket.errors import ConfigError, PhaseError

pytestmark = pytest.mark.dist

STEPS = 12
LEARNING_RATE = 3e-3
BUCKET_NUMEL = 400
CLIP = 0.05

Outcome = tuple[list[float], dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train, from step ``first`` up to, but not including, ``last``.

    Args:
        expert_parallel: ranks with different experts; 0: no parameter is marked as an expert's.
        fields: of Megatron's DDP config, and ``calculate_per_token_loss``.
        root: of the checkpoint that our side loads before step ``first``, if that is not 0, and saves at the end.
    """

    expert_parallel: int
    dtype: torch.dtype
    num_microbatches: int
    fields: dict[str, Any]
    first: int = 0
    last: int = STEPS
    root: str | None = None


class _Apart(torch.autograd.Function):
    """A product with a weight whose gradient is computed later."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: DelayedLinear) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        return inputs @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.layer.waiting.append((inputs, grad))
        return grad @ weight, None, None


class DelayedLinear(torch.nn.Linear):
    """Computes weight gradients apart from backward, with the callbacks of Transformer Engine's layers."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.weight.skip_backward_post_hook = True
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.callbacks: list[Callable[[], None]] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Apart.apply(inputs, self.weight, self) + self.bias

    def backward_dw(self) -> None:
        while self.waiting:
            inputs, grad = self.waiting.pop(0)
            with torch.no_grad():
                self.weight.grad = grad.T @ inputs
            for callback in self.callbacks:
                callback()


def threshold_of(step: int) -> float:
    """Return what to clip at: in every other step less than half of the norm."""
    return CLIP if step % 2 else 0.0


def train(rank: Rank, side: str, case: Case) -> Outcome:
    """Train in Megatron's loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        return {"ours": train_ours, "theirs": train_theirs}[side](rank, case)


def train_ours(rank: Rank, case: Case) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from megabucket.integrations.megatron import DistributedDataParallel, DistributedOptimizer

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=max(case.expert_parallel, 1), create_gloo_process_groups=False
    )
    transformer, options = transformer_config(case.fields)
    module = scheduled_model(rank, case, transformer)
    ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(**options), module)
    config = OptimizerConfig(clip_grad=1.0, use_distributed_optimizer=options.get("use_distributed_optimizer", False))
    optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), config, [ddp])
    scheduler = scheduler_of(optimizer)

    def update(threshold: float) -> float:
        config.clip_grad = threshold
        updated, norm, _ = optimizer.step()
        assert updated
        scheduler.step(1)
        return norm

    try:
        if case.first:
            loaded = mb.load_checkpoint(case.root, ddp.wrapper, optimizer.optimizer, schedulers=scheduler)
            assert (loaded.step, scheduler.num_steps) == (case.first, case.first)
        norms = drive(rank, ddp, transformer, case, update, optimizer.zero_grad)
        if case.root is not None:
            mb.save_checkpoint(case.root, ddp.wrapper, optimizer.optimizer, step=case.last, schedulers=scheduler)
        ddp.disable_forward_pre_hook()
        return norms, weights_of(module)
    finally:
        ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


def train_theirs(rank: Rank, case: Case) -> Outcome:
    from megatron_side import MegatronSide

    transformer, options = transformer_config(case.fields)
    module = scheduled_model(rank, case, transformer)
    is_sharded = options.pop("use_distributed_optimizer", False)
    side = MegatronSide(
        module,
        expert_parallel=max(case.expert_parallel, 1),
        learning_rate=LEARNING_RATE,
        is_sharded=is_sharded,
        transformer=transformer,
        **options,
    )
    scheduler = scheduler_of(side.optimizer)

    def update(threshold: float) -> float:
        norm = side.update(threshold)
        scheduler.step(1)
        return norm

    try:
        norms = drive(rank, side.ddp, transformer, case, update, side.optimizer.zero_grad)
        if options.get("overlap_param_gather"):
            side.ddp.start_param_sync(force_sync=True)
        return norms, weights_of(module)
    finally:
        side.close()


def scheduler_of(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=LEARNING_RATE / 10,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 5,
        lr_warmup_steps=3,
        lr_decay_steps=STEPS,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=STEPS,
        wd_incr_style="linear",
    )


def transformer_config(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return Megatron's config of a model, and the fields of its DDP config."""
    from megatron.core.transformer import TransformerConfig

    options = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True, "bucket_size": BUCKET_NUMEL, **fields}
    per_token = options.pop("calculate_per_token_loss", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron about its own defaults
        config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=per_token)
    return config, options


def scheduled_model(rank: Rank, case: Case, transformer: Any) -> torch.nn.Module:
    """Return a model with what Megatron's schedule asks of one."""
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

    if case.expert_parallel == 0:
        model = Moe(range(NUM_EXPERTS))
        for param in model.parameters():
            param.allreduce = True
    else:
        exchanging, _ = groups_of(rank.index, case.expert_parallel, rank.size)
        model = Moe(own_experts(rank.index, case.expert_parallel), exchanging)
    if case.fields.get("delay_wgrad_compute"):
        model.mixer, model.head = DelayedLinear(model.mixer), DelayedLinear(model.head)
    return Scheduled(model.to(case.dtype))


def drive(
    rank: Rank,
    ddp: Any,
    transformer: Any,
    case: Case,
    update: Callable[[float], float],
    zero_grad: Callable[[], None],
) -> list[float]:
    """Train as ``train_step`` of Megatron-LM does, and return the norms."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron_side import on_cpu

    delayed = [layer for layer in ddp.module.modules() if isinstance(layer, DelayedLinear)]

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        with ddp.no_sync():
            yield
            for layer in delayed:
                layer.backward_dw()

    def finalize(*args: Any, **kwargs: Any) -> None:
        for layer in delayed:
            layer.backward_dw()
        finalize_model_grads(*args, **kwargs)

    transformer.no_sync_func = no_sync
    transformer.finalize_model_grads_func = finalize

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
    slots = [rank.index * case.num_microbatches + number for number in range(case.num_microbatches)]
    for step in range(case.first, case.last):
        ddp.zero_grad_buffer()
        zero_grad()
        with on_cpu():
            losses = forward_backward_no_pipelining(
                forward_step_func=forward_step,
                data_iterator=iter([tokens_of(slot, step) for slot in slots]),
                model=[ddp],
                num_microbatches=case.num_microbatches,
                seq_length=1,
                micro_batch_size=1,
            )
        assert len(losses) == case.num_microbatches
        norms.append(update(threshold_of(step)))
    return norms


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def assert_equal(pool: WorkerPool, case: Case, *, ranks: int) -> None:
    ours = pool.run(train, "ours", case, ranks=ranks)
    theirs = pool.run(train, "theirs", case, ranks=ranks)
    for (norms, weights), (their_norms, their_weights) in zip(ours, theirs, strict=True):
        assert norms == their_norms
        assert min(norms) > 2 * CLIP
        assert weights.keys() == their_weights.keys()
        assert [name for name in weights if not torch.equal(weights[name], their_weights[name])] == []


SHARDED = {"use_distributed_optimizer": True}
GATHERING = SHARDED | {"overlap_param_gather": True}
BLOCKING = {"overlap_grad_reduce": False}
PER_TOKEN = {"calculate_per_token_loss": True}
DELAYED = {"delay_wgrad_compute": True}


@pytest.mark.parametrize(
    "case",
    [
        Case(0, torch.float32, 3, GATHERING),
        pytest.param(Case(1, torch.bfloat16, 2, SHARDED), marks=pytest.mark.nightly),
        pytest.param(Case(1, torch.float32, 2, DELAYED), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_one_rank_in_megatrons_schedule_ends_with_megatrons_bits(pool_of_one, case):
    assert_equal(pool_of_one, case, ranks=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case(0, torch.float32, 1, {}),
        Case(0, torch.bfloat16, 3, SHARDED),
        Case(0, torch.float32, 3, SHARDED | DELAYED),
        Case(2, torch.float32, 2, GATHERING),
        Case(2, torch.bfloat16, 3, GATHERING),
        Case(1, torch.float32, 1, SHARDED),
    ],
    ids=str,
)
def test_two_ranks_in_megatrons_schedule_end_with_megatrons_bits(pool_of_two, case):
    assert_equal(pool_of_two, case, ranks=2)


IN_BF16 = {"grad_reduce_in_fp32": False}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case(0, torch.float32, 1, {}),
        Case(0, torch.float32, 2, SHARDED),
        Case(0, torch.float32, 1, BLOCKING),
        Case(0, torch.bfloat16, 2, {}),
        Case(0, torch.bfloat16, 1, GATHERING),
        Case(0, torch.bfloat16, 1, IN_BF16),
        Case(0, torch.bfloat16, 2, SHARDED | IN_BF16),
    ],
    ids=str,
)
def test_three_ranks_in_megatrons_schedule_end_with_megatrons_bits(pool_of_three, case):
    assert_equal(pool_of_three, case, ranks=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        Case(0, torch.float32, 1, SHARDED),
        Case(0, torch.bfloat16, 3, GATHERING),
        Case(0, torch.float32, 3, SHARDED | PER_TOKEN),
        Case(2, torch.float32, 1, {}),
        Case(2, torch.float32, 3, SHARDED),
        Case(2, torch.bfloat16, 1, SHARDED | BLOCKING),
        Case(4, torch.float32, 2, GATHERING | DELAYED),
    ],
    ids=str,
)
def test_four_ranks_in_megatrons_schedule_end_with_megatrons_bits(pool, case):
    assert_equal(pool, case, ranks=NUM_RANKS)


@pytest.mark.nightly
@pytest.mark.parametrize("before", [2, 4], ids=["two to four", "four to two"])
@pytest.mark.parametrize("expert_parallel", [0, 2], ids=["dense", "experts"])
def test_a_run_that_goes_on_with_other_ranks_ends_where_megatrons_does(pool, pool_of_two, tmp_path, expert_parallel, before):
    whole = Case(expert_parallel, torch.float32, 1, GATHERING)
    pools, half = {2: pool_of_two, 4: pool}, STEPS // 2

    theirs = pool.run(train, "theirs", whole, ranks=NUM_RANKS)
    for ranks, first, last in ((before, 0, half), (6 - before, half, STEPS)):
        case = dataclasses.replace(whole, num_microbatches=NUM_RANKS // ranks, first=first, last=last, root=str(tmp_path))
        ours = pools[ranks].run(train, "ours", case, ranks=ranks)

    expected, found = ({name: one for _, weights in side for name, one in weights.items()} for side in (theirs, ours))
    initial = {f"model.{name}": param for name, param in Moe().named_parameters()}
    assert found.keys() == expected.keys() == initial.keys()
    for name, weight in expected.items():
        moved = (weight - initial[name]).abs().max()
        assert (found[name] - weight).abs().max() <= 1e-4 * moved, name


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
        ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(**SHARDED), module)
        config = OptimizerConfig(fp16=True, initial_loss_scale=1024.0, hysteresis=1, clip_grad=0.0, **SHARDED)
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


@pytest.mark.nightly
def test_a_step_after_loading_equals_the_one_after_saving_and_overflows_lower_the_scale(pool_of_two):
    pool_of_two.run(resume_and_scale, ranks=2)


def train_in_phases(_: Rank, has_phases: bool) -> dict[str, torch.Tensor]:
    """Train with Megatron's calls; with phases as its loop for reinforcement learning makes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        from megabucket.integrations.megatron import DistributedDataParallel, DistributedOptimizer

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        transformer, _ = transformer_config({})
        torch.manual_seed(0)
        ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(**SHARDED), torch.nn.Linear(8, 8).bfloat16())
        config = OptimizerConfig(bf16=True, clip_grad=1.0, **SHARDED)
        optimizer = DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE), config, ddp)
    try:
        for step in range(3):
            ddp.zero_grad_buffer()
            ddp(torch.full((2, 8), 0.5 + step).bfloat16()).float().square().mean().backward()
            ddp.finish_grad_sync()
            optimizer.step()
            if has_phases:
                ddp.offload_grad_buffers()
                optimizer.offload_to_cpu()
                assert ddp.wrapper._kinds_away == {"grads", "optimizer", "main_params"}
                with pytest.raises(PhaseError, match="'grads', 'main_params', 'optimizer'"):
                    ddp.zero_grad_buffer()
                optimizer.restore_from_cpu()
                with pytest.raises(PhaseError, match="given back 'grads'"):
                    optimizer.step()
                ddp.restore_grad_buffers(synchronize=False)
        return weights_of(ddp.module)
    finally:
        ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


def test_megatrons_calls_give_memory_back_and_take_it(pool_of_one):
    (found,), (expected,) = (pool_of_one.run(train_in_phases, flag, ranks=1) for flag in (True, False))

    assert all(torch.equal(value, expected[name]) for name, value in found.items())


REFUSED_DDP = """
    data_parallel_sharding_strategy disable_symmetric_registration fp8_param_gather fsdp_double_buffer
    fsdp_manual_registration gradient_reduce_div_fusion keep_fp8_transpose_cache nccl_ub outer_dp_sharding_strategy
    preserve_fp32_weights reuse_grad_buf_for_mxfp8_param_ag suggested_communication_unit_size use_custom_fsdp use_megatron_fsdp
"""
REFUSED_OPTIMIZER = """
    apply_wd_to_qk_layernorm config_logger_dir decoupled_lr decoupled_min_lr fp8_recipe optimizer optimizer_cpu_offload
    overlap_param_gather_with_optimizer_step reuse_grad_buf_for_mxfp8_param_ag use_precision_aware_optimizer
"""
REFUSED_TRANSFORMER = "cuda_graph_impl defer_embedding_wgrad_compute"
MISSING = """
    bucket_groups bucket_size expert_parallel_bucket_groups grad_accs load_parameter_state
    param_to_bucket_group remove_forward_pre_hook_handles save_parameter_state split_state_dict_if_needed use_forward_hook
"""
REFUSED_CALLS = """
    count_zeros get_grad_stats_parallel_group get_main_grads_for_grad_norm prepare_grads step_with_ready_grads
"""


def refused_fields(rank: Rank) -> dict[str, tuple[str, str]]:
    """Return, of each field that is refused, what the text of the error must say and the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        from megabucket.integrations import megatron as adapter

    transformer, _ = transformer_config({})

    def as_optimizer(config: Any) -> None:
        adapter._check_optimizer_config(config, torch.optim.AdamW([torch.zeros(1)]), is_sharded=False)

    def as_transformer(config: Any) -> None:
        adapter.DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(1, 1))

    found = {}
    for make, check, names in (
        (DistributedDataParallelConfig, adapter.config_from, REFUSED_DDP),
        (OptimizerConfig, as_optimizer, REFUSED_OPTIMIZER),
        (lambda: copy.copy(transformer), as_transformer, REFUSED_TRANSFORMER),
    ):
        for name in names.split():
            config = make()
            supported = getattr(config, name)
            setattr(config, name, 2 if isinstance(supported, int) else "other")
            found[name] = (f"{name}={getattr(config, name)!r} (must be {supported!r}: ", text_of(check, config))
    for name, value, supported in (
        ("lr", 0.5, 0.001),
        ("adam_beta2", 0.5, 0.999),
        ("decoupled_weight_decay", False, True),
        ("use_distributed_optimizer", True, False),
    ):
        found[name] = (f"{name}={value} (must be {supported}: ", text_of(as_optimizer, OptimizerConfig(**{name: value})))
    as_optimizer(OptimizerConfig(lr=1e-3, weight_decay=1e-2, min_lr=1e-5, barrier_with_L1_time=True, muon_momentum=0.5))
    as_optimizer(OptimizerConfig(optimizer="sgd"))
    known = {*adapter._KNOWN.split(), *adapter._ONE_TRANSFORMER}
    assert vars(adapter.ModelParallelConfig()).keys() <= known  # those of this version; later ones are refused
    return found


def text_of(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value)


def test_each_field_without_a_counterpart_is_refused_by_name(pool_of_one):
    (found,) = pool_of_one.run(refused_fields, ranks=1)

    for expected, text in found.values():
        assert re.fullmatch(
            rf"\w+Config has values that are not supported: {re.escape(expected)}.+\)\. All refused fields are in .*", text
        )
        assert "not known to the adapter" not in text
    assert found["nccl_ub"][1].endswith(
        "memory is not registered with NCCL). All refused fields are in docs/migrate/megatron.md."
    )


def later_versions(rank: Rank) -> dict[str, str]:
    """Return the texts for what versions after this one have, and check what is taken of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        from megabucket.integrations import megatron as adapter

    @dataclasses.dataclass
    class LaterWrapperConfig(DistributedDataParallelConfig):
        num_buckets: int | None = None
        param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
        fp4_param_gather: bool = False
        of_tomorrow: int = 0

    @dataclasses.dataclass
    class LaterOptimizerConfig(OptimizerConfig):
        grad_norm_skip_threshold: float = float("inf")
        lion_beta1: float = 0.95
        optimizer_cuda_graph: bool = False

    @dataclasses.dataclass
    class LaterModelConfig(ModelParallelConfig):
        gtp_weight_remat_size: int = 1
        of_tomorrow: int = 0

    taken = adapter.config_from(LaterWrapperConfig(num_buckets=3, param_name_patterns_for_fp32_local_accumulation=("*.bias",)))
    assert (taken.num_buckets, taken.param_name_patterns_for_fp32_local_accumulation) == (3, ("*.bias",))
    assert adapter.config_from(LaterWrapperConfig(num_buckets=3, bucket_size=400)).bucket_size == 400
    found = {
        name: text_of(adapter.config_from, LaterWrapperConfig(**{name: 1})) for name in ("fp4_param_gather", "of_tomorrow")
    }

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    transformer, _ = transformer_config({})
    own = DistributedDataParallelConfig()
    wrappers = []

    def wrap(**arguments: Any) -> Any:
        wrappers.append(adapter.DistributedDataParallel(transformer, own, torch.nn.Linear(3, 3), **arguments))
        return wrappers[-1]

    def wrap_marked(mark: str) -> None:
        module = torch.nn.Linear(3, 3)
        setattr(module.weight, mark, "mtp")
        adapter.DistributedDataParallel(transformer, own, module)

    try:
        for mark in ("grad_norm_group", "is_gtp_weight_remat"):
            found[mark] = text_of(wrap_marked, mark)
        found["full_param_layout"] = text_of(lambda: wrap(full_param_layout=object()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "ModelParallelConfig", LaterModelConfig)
            for name in ("gtp_weight_remat_size", "of_tomorrow"):
                patch.setattr(transformer, "gtp_weight_remat_size", 1, raising=False)
                patch.setattr(transformer, "of_tomorrow", 0, raising=False)
                patch.setattr(transformer, name, 2)
                found[f"model's {name}"] = text_of(wrap)
        ddp = wrap(full_param_layout=None)
        config = LaterOptimizerConfig(lr=0.1, grad_norm_skip_threshold=1e-9, lion_beta1=0.5)
        found["dump_param_to_param_group_map"] = text_of(
            lambda: adapter.get_megatron_optimizer(config, [ddp], dump_param_to_param_group_map="somewhere")
        )
        graph = LaterOptimizerConfig(lr=0.1, optimizer_cuda_graph=True)
        found["optimizer_cuda_graph"] = text_of(adapter.get_megatron_optimizer, graph, [ddp])
        optimizer = adapter.get_megatron_optimizer(config, ddp)
        ddp(torch.ones(2, 3)).sum().backward()
        ddp.finish_grad_sync()
        assert optimizer.step()[0] is False  # the threshold
        return found
    finally:
        for ddp in wrappers:
            ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


def test_what_later_versions_have_is_taken_or_refused_by_name(pool_of_one):
    (found,) = pool_of_one.run(later_versions, ranks=1)

    for name, text in found.items():
        assert name.removeprefix("model's ") in text
        assert ("not known to the adapter" in text) == ("of_tomorrow" in name)


def as_megatron_sees_it(rank: Rank) -> None:
    """Check what Megatron's training loop asks of a wrapper and an optimizer by their classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import distributed, optimizer, parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.utils import get_model_config, unwrap_model
        from megatron_side import on_cpu

        from megabucket.integrations import megatron as adapter

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    transformer, _ = transformer_config({})
    module = torch.nn.Linear(3, 3)
    ddp = adapter.DistributedDataParallel(transformer, distributed.DistributedDataParallelConfig(**SHARDED), module)
    try:
        assert isinstance(ddp, distributed.DistributedDataParallel)  # train() sets no_sync_func for it alone
        assert unwrap_model([ddp]) == [module]
        assert get_model_config(ddp) is transformer
        assert list(unwrap_model(ddp).state_dict()) == ["weight", "bias"]
        assert list(ddp.buffers()) == ddp.buffers + ddp.expert_parallel_buffers == []
        assert "read model.wrapper.param_and_grad_buffers" in text_of(list, ddp.expert_parallel_buffers)
        assert set(vars(distributed.DistributedDataParallel)) <= set(vars(adapter.DistributedDataParallel))  # nothing inherited
        config = OptimizerConfig(lr=0.1, **SHARDED)
        with on_cpu():
            text = text_of(optimizer.get_megatron_optimizer, config, [ddp], None, False)
        assert "call megabucket.integrations.megatron.get_megatron_optimizer()" in text
        made = adapter.get_megatron_optimizer(config, ddp)
        assert made.chained_optimizers == [made]
        assert made.prepare_model_params_for_param_sync() is None
        assert {group["wd_mult"] for group in made.param_groups} == {0.0, 1.0}  # Megatron's groups: biases do not decay
        for owner, name in (
            (ddp, "free_overlap_buffers"),
            (made, "save_state_dict_to_file"),
            (made, "load_parameter_state_from_dp_zero"),
        ):
            with pytest.raises(AttributeError, match=f"of the adapter has no {name}; "):
                getattr(owner, name)
        assert "wrapped by megabucket.integrations.megatron, got" in text_of(adapter.get_megatron_optimizer, config, [module])
        two = text_of(adapter.DistributedOptimizer, [torch.optim.AdamW(ddp.parameters())] * 2, config, [ddp])
        assert "2 torch optimizers for 1 model chunks" in two
    finally:
        ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


def test_megatron_takes_the_adapter_for_its_own_wrapper_and_runs_nothing_of_it(pool_of_one):
    pool_of_one.run(as_megatron_sees_it, ranks=1)


def names_of_wrapper(rank: Rank) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    methods = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    return methods | {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}


def test_the_page_names_each_field_and_each_method_of_megatrons_wrapper(pool_of_one):
    page = (Path(__file__).parents[2] / "docs/migrate/megatron.md").read_text()
    (names,) = pool_of_one.run(names_of_wrapper, ranks=1)

    assert len(names) > 30
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def surfaces(rank: Rank) -> tuple[set[str], set[str]]:
    """Return Megatron's names that the adapter does not have, and methods that it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import distributed, parallel_state
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        from megabucket.integrations import megatron as adapter

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    transformer, _ = transformer_config({})
    ddp = adapter.DistributedDataParallel(transformer, distributed.DistributedDataParallelConfig(), torch.nn.Linear(3, 3))
    optimizer = adapter.DistributedOptimizer(torch.optim.AdamW(ddp.parameters()), OptimizerConfig(), ddp)
    missing, refused = set(), set()
    try:
        for ours, theirs in ((ddp, distributed.DistributedDataParallel), (optimizer, DistributedOptimizer)):
            names = {name for name in dir(theirs) if not name.startswith("_")}
            if ours is ddp:
                names |= set(re.findall(r"self\.([a-z]\w*)(?:: \S+)? = ", inspect.getsource(theirs.__init__)))
            parts = re.compile(r"checkpoint_\w+|(get|load|sharded)_param(eter)?_state_\w+")  # of Megatron's checkpoint format
            missing |= {name for name in names if not parts.fullmatch(name) and not hasattr(ours, name)}
        for name in vars(adapter.DistributedOptimizer):
            if (
                getattr(adapter.DistributedOptimizer, name) is adapter.DistributedOptimizer._refuse_call
                and name != "_refuse_call"
            ):
                assert "step() counts zeros" in text_of(getattr(optimizer, name))
                refused.add(name)
        for owner, name, instead in (
            (ddp, "expert_parallel_bucket_groups", "read ddp.wrapper.bucket_groups"),
            (optimizer, "save_parameter_state", "call megabucket.save_checkpoint"),
        ):
            with pytest.raises(AttributeError, match=f"of the adapter has no {name}; {instead}"):
                getattr(owner, name)
        for owner in (ddp, optimizer):
            with pytest.raises(AttributeError, match="object has no attribute 'nonsense'"):
                owner.nonsense  # noqa: B018
        assert ddp.params_with_grad == list(ddp.module.parameters())
        assert ddp.dp_group.size() == ddp.expt_dp_group.size() == 1
        assert optimizer.state_dict(is_loading=True).keys() == {"optimizer"}
        return missing, refused
    finally:
        ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


def test_each_name_of_megatrons_wrapper_and_optimizer_is_there_or_missing_or_refused(pool_of_one):
    ((missing, refused),) = pool_of_one.run(surfaces, ranks=1)

    assert missing == set(MISSING.split())
    assert refused == set(REFUSED_CALLS.split())
