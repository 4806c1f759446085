"""Megatron's ``dist_checkpointing`` between its own optimizer and the adapter's: a run that changes sides keeps its bits.

Six steps on one side, saved and loaded by Megatron, and six on the other end where twelve of Megatron's own do. In the third
step the learning rate is halved, so hyperparameters have to come out of the checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import multiprocessing.dummy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from moe_ranks import NUM_EXPERTS, NUM_RANKS, NUM_TOKENS, VOCABULARY, Moe, groups_of, loss_of, own_experts, tokens_of
from pool import Rank, WorkerPool
from torch.optim.adamw import adamw

from megabucket.errors import ConfigError, MegabucketError, PeerFailedError

pytestmark = pytest.mark.dist

STEPS, HALF = 12, 6
LEARNING_RATE = 3e-3
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

Weights = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train, from step ``first`` up to, but not including, ``last``.

    Args:
        expert_parallel: ranks with different experts; 0: no parameter is marked as an expert's.
        root: of the checkpoint that is loaded before step ``first``, if that is not 0, and saved at step ``HALF``.
        num_microbatches: of each rank.
        is_gpt: a model of Megatron's own layers.
        bucket_numel: of Megatron's side, which has all parameters in one bucket by default.
        metadata: for ``sharded_state_dict``.
    """

    expert_parallel: int
    dtype: torch.dtype
    root: str
    first: int = 0
    last: int = STEPS
    num_microbatches: int = 1
    is_gpt: bool = False
    bucket_numel: int | None = None
    metadata: tuple[tuple[str, Any], ...] = tuple(FORMAT.items())


def train(rank: Rank, side: str, case: Case) -> Weights:
    """Train on one side, and return the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        made = {"ours": Ours, "theirs": Theirs, "theirs, counting": TheirsCounting}[side](rank, case)
        try:
            if case.first:
                made.load(case.root)
            for step in range(case.first, case.last):
                if step == HALF // 2:
                    for group in made.optimizer.param_groups:
                        group["lr"] /= 2
                made.train_step(step)
            if case.last == HALF:
                made.save(case.root)
            return made.weights()
        finally:
            made.close()


class Side:
    """A model, its wrapper and its optimizer."""

    ddp: Any
    optimizer: Any

    def __init__(self, rank: Rank, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer import TransformerConfig

        self.rank, self.case = rank, case
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=max(case.expert_parallel, 1), create_gloo_process_groups=False
        )
        self.config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
        self.module = gpt_model(case) if case.is_gpt else stored_model(rank, case, self.config)

    def train_step(self, step: int) -> None:
        slots = [self.rank.index * self.case.num_microbatches + number for number in range(self.case.num_microbatches)]
        for slot in slots[:-1]:
            with self.ddp.no_sync():
                self.backward(slot, step)
        self.backward(slots[-1], step)
        self.ddp.finish_grad_sync()
        self.update()
        self.ddp.zero_grad_buffer()

    def backward(self, slot: int, step: int) -> None:
        with on_cpu():
            (loss_of(self.ddp, tokens_of(slot, step)) / self.case.num_microbatches).backward()

    def update(self) -> None:
        assert self.optimizer.step()[0]

    def sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        """Return what Megatron-LM gives ``dist_checkpointing``."""
        with on_cpu():
            model = self.module.sharded_state_dict()
            metadata = dict(self.case.metadata)
            optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(self, root: str) -> None:
        from megatron.core import dist_checkpointing

        with on_cpu(), writing_in_threads():
            dist_checkpointing.save(self.sharded_state(is_loading=False), root)

    def load(self, root: str) -> None:
        from megatron.core import dist_checkpointing

        with on_cpu():
            loaded = dist_checkpointing.load(self.sharded_state(is_loading=True), root)
            self.module.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])

    def weights(self) -> Weights:
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}


class Ours(Side):
    """The adapter."""

    def __init__(self, rank: Rank, case: Case) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        from megabucket.integrations.megatron import DistributedDataParallel, DistributedOptimizer

        super().__init__(rank, case)
        options = {"grad_reduce_in_fp32": True, "bucket_size": 400, **SHARDED}
        self.ddp = DistributedDataParallel(self.config, DistributedDataParallelConfig(**options), self.module)
        params = list(self.ddp.parameters())
        groups = [
            {"params": [param for param in params if param.ndim > 1]},
            {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0, "wd_mult": 0.0},
        ]
        torch_optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
        is_scaled = case.dtype == torch.float16
        config = OptimizerConfig(clip_grad=0.0, use_distributed_optimizer=True, fp16=is_scaled, initial_loss_scale=1024.0)
        self.optimizer = DistributedOptimizer(torch_optimizer, config, [self.ddp])

    def weights(self) -> Weights:
        self.ddp.disable_forward_pre_hook()
        return super().weights()

    def close(self) -> None:
        from megatron.core import parallel_state

        self.ddp.wrapper.detach()
        parallel_state.destroy_model_parallel()


class Theirs(Side):
    """Megatron's own, with torch's AdamW. It can save its state, but not load it: see ``CountingAdamW``."""

    make_adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __init__(self, rank: Rank, case: Case) -> None:
        from megatron_side import MegatronSide

        super().__init__(rank, case)
        options = {"grad_reduce_in_fp32": True, "bucket_size": case.bucket_numel, **SHARDED}
        self._side = MegatronSide(
            self.module,
            expert_parallel=max(case.expert_parallel, 1),
            learning_rate=LEARNING_RATE,
            is_sharded=options.pop("use_distributed_optimizer"),
            spares_vectors=True,
            make_adam=self.make_adam,
            **options,
        )
        self.ddp, self.optimizer = self._side.ddp, self._side.optimizer

    def update(self) -> None:
        self._side.update(0.0)
        self.optimizer.zero_grad()

    def close(self) -> None:
        self._side.close()


class CountingAdamW(torch.optim.Optimizer):
    """AdamW of torch that counts steps in its groups, as the Adam of Apex and of Transformer Engine does.

    Megatron 0.16.1 loads the format into such an optimizer only. With torch's own its load finds no count in an optimizer
    without state, misses it among the loaded tensors, and would give all parameters one tensor to count in.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        torch_defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        super().__init__(groups, {"lr": lr, "bias_correction": True, **torch_defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["bias_correction"]
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param] = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            before, group["step"] = group.get("step", 0), group.get("step", 0) + 1
            adamw(
                params,
                [param.grad for param in params],
                *([self.state[param][key] for param in params] for key in ("exp_avg", "exp_avg_sq")),
                [],
                [torch.tensor(float(before)) for _ in params],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class TheirsCounting(Theirs):
    """Megatron's own, with an Adam that Megatron takes for Apex's."""

    make_adam = CountingAdamW

    def __init__(self, rank: Rank, case: Case) -> None:
        from megatron.core.optimizer import distrib_optimizer

        self._patches = contextlib.ExitStack()
        found = {"Adam": CountingAdamW, "HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True}
        self._patches.enter_context(mock.patch.multiple(distrib_optimizer, **found))
        super().__init__(rank, case)

    def close(self) -> None:
        self._patches.close()
        super().close()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Also leave tensors where they are, when Megatron sends them to a device to gather them; and what its layers ask for."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron_side import on_cpu as on_cpu_device

    def stay(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with (
        on_cpu_device(),
        mock.patch.object(torch.Tensor, "cuda", stay),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "Stream"),
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),  # no layer drops anything
    ):
        yield


@contextlib.contextmanager
def writing_in_threads() -> Iterator[None]:
    """Write files in threads: Megatron starts a process for each, which a rank of the pool may not, and reads its memory."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with (
        mock.patch.object(filesystem_async.mp, "get_context", return_value=multiprocessing.dummy),
        mock.patch.object(filesystem_async, "_process_memory", return_value=0),
    ):
        yield


def stored_model(rank: Rank, case: Case, config: Any) -> torch.nn.Module:
    """Return a model that says which parts of the whole it holds."""
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.utils import make_sharded_tensor_for_checkpoint

    class Stored(MegatronModule):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(config)
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens)

        def sharded_state_dict(self, *_: Any) -> dict[str, Any]:
            found = {}
            for name, tensor in self.state_dict(keep_vars=True).items():
                expert = re.fullmatch(r"model\.experts\.(\d+)\.(.+)", name)
                if expert is None:
                    found[name] = make_sharded_tensor_for_checkpoint(tensor, name)
                else:  # as in Megatron's SequentialMLP: one tensor of all experts
                    place = (0, int(expert[1]), NUM_EXPERTS)
                    replica = (0, 0, groups[1].rank() if groups else rank.index)
                    key = f"model.experts.{expert[2]}"
                    found[name] = make_sharded_tensor_for_checkpoint(tensor, key, (place,), replica_id=replica)
            # As the fused weight of a gated layer: two halves.
            found["model.mixer.weight"] = apply_swiglu_sharded_factory(found["model.mixer.weight"], ())
            return found

    if case.expert_parallel:
        groups = list(groups_of(rank.index, case.expert_parallel, rank.size))
        model = Moe(own_experts(rank.index, case.expert_parallel), groups[0])
    else:
        groups, model = [], Moe(range(NUM_EXPERTS))
        for param in model.parameters():
            param.allreduce = True
    return Stored(model.to(case.dtype))


def gpt_model(case: Case) -> torch.nn.Module:
    """Return Megatron's ``GPTModel`` with tied embeddings over the tokens of ``moe_ranks``, which are one sequence."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    class Gpt(GPTModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS).tril().logical_not()
            return super().forward(tokens[None], torch.arange(NUM_TOKENS)[None], mask)[0].float()

    moe_utils.te_general_gemm = None  # the wheel misses the name without Transformer Engine
    own = {"expert_model_parallel_size": case.expert_parallel, "num_moe_experts": NUM_EXPERTS, "add_bias_linear": False}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bf16=case.dtype == torch.bfloat16,
        params_dtype=case.dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        moe_router_load_balancing_type="none",
        **(own if case.expert_parallel else {}),
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    torch.manual_seed(0)
    with on_cpu():
        return Gpt(config, spec, VOCABULARY, NUM_TOKENS, share_embeddings_and_output_weights=True).to(case.dtype)


def pool_of(num_ranks: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(num_ranks=num_ranks)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool_of_one():
    yield from pool_of(1)


@pytest.fixture(scope="module")
def pool_of_two():
    yield from pool_of(2)


def assert_same_bits(found: list[Weights], expected: list[Weights]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.keys() == other.keys()
        assert [name for name in own if not torch.equal(own[name], other[name])] == []


def run_halves(pool: WorkerPool, sides: tuple[str, str], case: Case, *, ranks: int) -> list[Weights]:
    """Train one half on each side; return the weights at the end."""
    pool.run(train, sides[0], dataclasses.replace(case, last=HALF), ranks=ranks)
    return pool.run(train, sides[1], dataclasses.replace(case, first=HALF), ranks=ranks)


DENSE, EXPERTS = (0, torch.bfloat16), (2, torch.float32)
CELLS = [
    pytest.param(*DENSE, id="dense in bfloat16"),
    pytest.param(*EXPERTS, id="experts"),
    pytest.param(0, torch.float32, id="dense", marks=pytest.mark.nightly),
    pytest.param(2, torch.bfloat16, id="experts in bfloat16", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("expert_parallel", "dtype"), CELLS)
def test_a_run_of_megatron_goes_on_here_with_the_same_bits(pool_of_two, tmp_path, expert_parallel, dtype):
    case = Case(expert_parallel, dtype, str(tmp_path))

    expected = pool_of_two.run(train, "theirs", case, ranks=2)
    found = run_halves(pool_of_two, ("theirs", "ours"), case, ranks=2)

    assert_same_bits(found, expected)


@pytest.mark.parametrize(("expert_parallel", "dtype"), CELLS)
def test_a_run_from_here_goes_on_in_megatron_with_the_same_bits(pool_of_two, tmp_path, expert_parallel, dtype):
    case = Case(expert_parallel, dtype, str(tmp_path))

    expected = pool_of_two.run(train, "ours", case, ranks=2)
    theirs = pool_of_two.run(train, "theirs", case, ranks=2)
    found = run_halves(pool_of_two, ("ours", "theirs, counting"), case, ranks=2)

    assert_same_bits(found, expected)
    assert_same_bits(theirs, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("sides", [("theirs", "ours"), ("ours", "theirs, counting"), ("ours", "ours")], ids=" to ".join)
def test_four_ranks_with_two_copies_of_experts_keep_their_bits(pool, tmp_path, sides):
    case = Case(2, torch.bfloat16, str(tmp_path))

    expected = pool.run(train, "theirs", case, ranks=NUM_RANKS)
    found = run_halves(pool, sides, case, ranks=NUM_RANKS)

    assert_same_bits(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(("expert_parallel", "dtype"), [(0, torch.float32), (2, torch.bfloat16)], ids=["dense", "experts"])
@pytest.mark.parametrize("sides", [("theirs", "ours"), ("ours", "theirs, counting")], ids=" to ".join)
def test_a_model_of_megatrons_layers_keeps_its_bits(pool_of_two, tmp_path, sides, expert_parallel, dtype):
    case = Case(expert_parallel, dtype, str(tmp_path), is_gpt=True)

    expected = pool_of_two.run(train, "theirs", case, ranks=2)
    found = run_halves(pool_of_two, sides, case, ranks=2)

    assert len(expected[0]) > 20
    assert_same_bits(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("sides", [("theirs, counting", "theirs, counting"), ("theirs, counting", "ours")], ids=" to ".join)
def test_an_adam_with_its_count_in_the_groups_keeps_its_bits(pool_of_two, tmp_path, sides):
    # With a prefix before the names of each of Megatron's optimizers.
    case = Case(2, torch.float32, str(tmp_path), metadata=tuple(FORMAT.items())[:1])

    expected = pool_of_two.run(train, "theirs", case, ranks=2)
    found = run_halves(pool_of_two, sides, case, ranks=2)

    assert_same_bits(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("expert_parallel", "after"), [(0, 1), (0, 4), (2, 4)], ids=["dense to 1", "dense to 4", "experts to 4"]
)
@pytest.mark.parametrize("sides", [("theirs", "ours"), ("ours", "theirs, counting")], ids=" to ".join)
def test_a_run_goes_on_with_other_ranks(pool_of_one, pool_of_two, pool, tmp_path, expert_parallel, after, sides):
    case = Case(expert_parallel, torch.float32, str(tmp_path), num_microbatches=2)
    rest = dataclasses.replace(case, first=HALF, num_microbatches=4 // after, expert_parallel=2 * expert_parallel)

    expected = pool_of_two.run(train, "theirs", case, ranks=2)
    pool_of_two.run(train, sides[0], dataclasses.replace(case, last=HALF), ranks=2)
    found = (pool_of_one if after == 1 else pool).run(train, sides[1], rest, ranks=after)

    initial = {f"model.{name}": param.detach() for name, param in Moe().named_parameters()}
    whole, other = ({name: one for of_rank in side for name, one in of_rank.items()} for side in (found, expected))
    assert whole.keys() == other.keys() == initial.keys()
    for name, weight in other.items():
        moved = (weight - initial[name]).abs().max()
        assert (whole[name] - weight).abs().max() <= 1e-4 * moved, name


@pytest.mark.nightly
def test_a_checkpoint_that_megatron_writes_wrong_is_refused(pool_of_two, tmp_path):
    # Its format loses state where buckets end in padding: it takes places in the buffer for places in the gathered values,
    # which have no padding.
    case = Case(0, torch.float32, str(tmp_path), bucket_numel=400)

    pool_of_two.run(train, "theirs", dataclasses.replace(case, last=HALF), ranks=2)
    with pytest.raises(
        AssertionError, match=r"its main parameter of '.*weight' does not round to the weight that is in the model"
    ):
        pool_of_two.run(train, "ours", dataclasses.replace(case, first=HALF), ranks=2)


def text_of(kind: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def refusals(rank: Rank) -> dict[str, str]:
    """Return the texts of the errors of ``sharded_state_dict``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Ours(rank, Case(0, torch.float32, ""))
    optimizer, model = made.optimizer, made.module.sharded_state_dict()

    def refused(**arguments: Any) -> str:
        return text_of(ConfigError, optimizer.sharded_state_dict, **{"model_sharded_state_dict": model, **arguments})

    try:
        found = {
            "format": refused(is_loading=True, metadata={"distrib_optim_sharding_type": "dp_reshardable"}),
            "older": refused(sharding_type="fully_sharded_model_space"),
            "memory": refused(metadata={"distrib_optim_fully_reshardable_mem_efficient": True}),
            "model": refused(model_sharded_state_dict={"model": {**model, "model.head.bias": torch.zeros(1)}}),
        }
        assert optimizer.sharded_state_dict(model, is_loading=True)["param_state_sharding_type"] == "fully_reshardable"
        first, second = optimizer.param_groups
        del second["wd_mult"]
        found["groups"] = refused()
        second["wd_mult"] = 0.0
        state = optimizer.state_dict()
        made.train_step(0)
        state = optimizer.state_dict()
        state["optimizer"]["state"][0]["step"] += 6
        optimizer.load_state_dict(state)
        found["steps"] = refused()
        first["amsgrad"] = True
        found["class"] = refused()
        return found
    finally:
        made.close()


def test_what_the_format_cannot_hold_is_refused(pool_of_two):
    for found in pool_of_two.run(refusals, ranks=2):
        assert found["format"].startswith("distrib_optim_sharding_type='dp_reshardable': of Megatron's formats 'fully_resh")
        assert found["older"].startswith("distrib_optim_sharding_type='fully_sharded_model_space': ")
        assert found["memory"].startswith("distrib_optim_fully_reshardable_mem_efficient=True: each rank gathers the ")
        assert found["model"].startswith("the model's sharded_state_dict() lacks 'model.head.bias', or ")
        assert f"and the same {MARKS} (False, 1.0, 1.0, False), by which" in found["groups"]
        assert found["steps"].startswith("parameters have taken [1, 7] steps")
        assert found["class"].startswith("AdamW: the format is Adam's without amsgrad; use ")


MARKS = "is_expert_parallel, wd_mult, lr_mult, is_decoupled_lr"
SPOILED: dict[tuple[Any, ...], tuple[Any, str]] = {
    (0, "optimizer", "param_groups", 0, "wd_mult"): (0.5, f"it has no group with {MARKS} (False, 1.0, 1.0, False); it has [("),
    (0, "optimizer", "param_groups", 1, "wd_mult"): (1.0, "two of its groups have other hyperparameters and the same is_"),
    (1, "param_state", 0, "exp_avg"): (None, "it lacks exp_avg of '"),
    (1, "param_state", 0, "param"): (torch.zeros(()), "does not round to the weight that is in the model"),
    (1,): (None, f"it has no group with {MARKS} (True, 1.0, 1.0, False); it has [("),
    (1, "optimizer", "param_groups", 0, "lr"): (1.0, "its experts have other hyperparameters than its dense parameters"),
    (1, "optimizer", "param_groups", 1, "step"): (7, "its groups have the step counts [1, 7], and not one"),
}
"""Places in what Megatron has loaded, what to put there (``None``: nothing), and a part of the error."""


def as_loaded(value: Any, *path: Any, then: Any = None) -> Any:
    """Return a copy of a sharded state dict with tensors, as they come from a checkpoint, and something else in one place."""
    if isinstance(value, dict):
        own = {key: one for key, one in value.items() if path != (key,) or then is not None}
        return {key: then if path == (key,) else as_loaded(one, *path_below(path, key), then=then) for key, one in own.items()}
    if isinstance(value, list):
        return [as_loaded(one, *path_below(path, index), then=then) for index, one in enumerate(value)]
    return value.data.detach().clone() if hasattr(value, "replica_id") else copy.deepcopy(value)


def path_below(path: tuple[Any, ...], key: Any) -> tuple[Any, ...]:
    return path[1:] if path[:1] == (key,) else ()


def load_what_does_not_fit(rank: Rank) -> tuple[dict[tuple[Any, ...], str], str]:
    """Return the texts of the errors, by place, and that where one rank alone has one. Nothing else changes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Ours(rank, Case(2, torch.bfloat16, ""))
    optimizer = made.optimizer

    def refused(path: tuple[Any, ...]) -> str:
        then, _ = SPOILED[path]
        return text_of(MegabucketError, optimizer.load_state_dict, as_loaded(saved["optimizer"], *path, then=then))

    try:
        made.train_step(0)
        saved = as_loaded(made.sharded_state(is_loading=False))
        before = optimizer.state_dict()["optimizer"]["state"]
        found = {path: refused(path) for path in SPOILED}
        place = (1, "param_state", 0, "exp_avg")
        alone = as_loaded(saved["optimizer"], *(place if rank.index else ()))
        found_alone = text_of(PeerFailedError, optimizer.load_state_dict, alone)
        after = optimizer.state_dict()["optimizer"]["state"]
        assert all(torch.equal(value, after[index][key]) for index, of in before.items() for key, value in of.items())
        made.train_step(1)
        expected = made.weights()
        made.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        made.train_step(1)
        assert_same_bits([made.weights()], [expected])
        return found, found_alone
    finally:
        made.close()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(pool_of_two):
    for found, alone in pool_of_two.run(load_what_does_not_fit, ranks=2):
        assert [path for path, (_, part) in SPOILED.items() if part not in found[path]] == []
        assert "rank 1 failed" in alone
        assert "it lacks exp_avg of '" in alone


def pass_on_the_scale(rank: Rank) -> None:
    """Give Megatron's loss scaler the state of ours, and take it back: before the first step, for which there are zeros."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.optimizer.grad_scaler import DynamicGradScaler

        made = Ours(rank, Case(0, torch.float16, ""))
    try:
        with on_cpu():
            theirs = DynamicGradScaler(
                8.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=100, hysteresis=1
            )
            saved = as_loaded(made.sharded_state(is_loading=False)["optimizer"])
            theirs.load_state_dict(saved["grad_scaler"])
            assert theirs.scale.item() == 1024.0
            theirs.update(found_inf=True)
            theirs.update(found_inf=True)
        made.optimizer.load_state_dict({**saved, "grad_scaler": theirs.state_dict()})
        assert made.optimizer.get_loss_scale().item() == theirs.scale.item() < 1024.0
        made.train_step(0)
        assert saved["optimizer"]["param_groups"][0]["step"] == 0
        assert made.optimizer.state_dict()["optimizer"]["state"][0]["step"] == 1
    finally:
        made.close()


def test_the_loss_scale_passes_between_the_scalers(pool_of_two):
    pool_of_two.run(pass_on_the_scale, ranks=2)
