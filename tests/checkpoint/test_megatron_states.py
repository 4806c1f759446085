"""States that megatron-core has made are imported bit by bit. Skipped where that wheel is not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kept_in_memory import KeptInMemory
from megatron_states import CASES, LATER, SHAPES, STEPS, Weights

import megabucket as mb
from megabucket.checkpoint.capture import TrainingParts, capture, to_host
from megabucket.checkpoint.convert.megatron import DpZeroState, import_dp_zero
from megabucket.errors import CheckpointMismatchError
from megabucket.testing import LoopbackWorld

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed: pip install megatron-core", allow_module_level=True)

pytestmark = pytest.mark.slow  # megatron-core in a process of its own

GROUPS = ({"params": [one for one in SHAPES if len(SHAPES[one]) > 1]}, {"params": ["norm", "scale"]})
EVERY_CASE = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """What Megatron has saved in each case, read without running anything that a file names."""
    directory = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("megatron_states.py")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    made = subprocess.run(
        [sys.executable, script, directory], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert made.returncode == 0, made.stderr[-4000:]
    return {name: torch.load(directory / f"{index}.pt", weights_only=True) for index, name in enumerate(CASES)}


def layout_of(case, **changes):
    """The layout that Megatron has made for two ranks, from its settings."""
    config = mb.DistributedDataParallelConfig(
        **{
            "layout": "megatron",
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": "bucket_size" in case,
            "bucket_size": case.get("bucket_size"),
            "grad_reduce_in_fp32": case.get("fp32_grads", False),
            **changes,
        }
    )
    specs = [
        mb.ParamSpec(
            name, tuple(param.shape), str(param.dtype).removeprefix("torch."), shared_embedding=name in case.get("shared", ())
        )
        for name, param in Weights(**case).named_parameters()
        if param.requires_grad
    ]
    return mb.build_layout(specs, config, dp_size=2)


def found_in(state, case, **changes):
    layout = layout_of(case, **changes)
    return DpZeroState(param_state=state["param_state"], layout=layout, step=state["step"], weights=state["weights"])


def check_state(kept, state, case):
    """Main parameters, moments and weights are those that Megatron's shards hold."""
    for name, param in Weights(**case).named_parameters():
        weight = kept.whole(f"model.{name}")
        assert weight.dtype == param.dtype
        assert torch.equal(weight, state["weights"][name])
        if name in SHAPES:
            own = {key: values.view(param.shape) for key, values in state["own"][name].items()}
            main = weight if param.dtype == torch.float32 else kept.whole(f"optim.main.{name}")
            assert torch.equal(main, own["param"])
            assert torch.equal(kept.whole(f"optim.state.{name}.exp_avg"), own["exp_avg"])
            assert torch.equal(kept.whole(f"optim.state.{name}.exp_avg_sq"), own["exp_avg_sq"])
            assert not torch.equal(weight, param)  # it has trained
    assert kept.whole("model.seen").item() == STEPS


def run_of(communicator, case):
    module = Weights(**{**case, "shared": ()})
    trained = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0},
    ]
    config = mb.DistributedDataParallelConfig(
        use_distributed_optimizer=True, bucket_size=500, grad_reduce_in_fp32=case.get("fp32_grads", False)
    )
    ddp = mb.DistributedDataParallel(module, config, communicator=communicator)
    return TrainingParts(ddp, mb.DistributedOptimizer(torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1), ddp))


@EVERY_CASE
def test_a_run_of_three_ranks_holds_what_megatron_held(states, name, tmp_path):
    case, state, world = CASES[name], states[name], LoopbackWorld(3, timeout_s=10)
    import_dp_zero(found_in(state, case), tmp_path, groups=GROUPS)

    def program(rank):
        parts = run_of(world.communicator(rank), case)
        mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)
        return to_host(capture(parts))

    kept = KeptInMemory(world.run(program))

    check_state(kept, state, case)
    (entries,) = {str(one["entries"]) for one in kept.values["optimizer"]["state"]}
    assert f"'{float(STEPS)}'" in entries


@EVERY_CASE
def test_training_goes_on_as_it_did_there(states, name, tmp_path):
    case, state, world = CASES[name], states[name], LoopbackWorld(2, timeout_s=10)
    import_dp_zero(found_in(state, case), tmp_path, groups=GROUPS)

    def program(rank):
        parts = run_of(world.communicator(rank), case)
        mb.load_checkpoint(tmp_path, parts.ddp, parts.optimizer)
        for step in range(STEPS, LATER):
            parts.ddp(step).backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        return parts.ddp.state_dict()

    for found in world.run(program):
        assert found.keys() == state["later"].keys()
        for key, weight in state["later"].items():
            assert torch.equal(found[key], weight), key


@EVERY_CASE
def test_another_layout_is_refused(states, name, tmp_path):
    case = CASES[name]

    with pytest.raises(CheckpointMismatchError, match=r"and the layout has .*, in buckets of"):
        import_dp_zero(found_in(states[name], case, overlap_grad_reduce=True, bucket_size=1), tmp_path)
