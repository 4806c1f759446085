"""Real ranks that are killed or told to stop, and started again: where they end is where a run without a break ends."""

import itertools
import json
import random
import signal
import subprocess
import sys
import time

import pytest
from launched import LIMIT_S
from train_ranks import start_training

from megabucket.checkpoint.offline import compare
from megabucket.checkpoint.stored import open_checkpoint

pytestmark = pytest.mark.dist

STEPS = 24


@pytest.fixture
def config_path(config_file, tmp_path):
    return config_file(
        {"mode": "reduce_scatter"},
        model={"num_layers": 2},
        optimizer={"warmup_steps": 4, "final_lr_fraction": 0.1},
        train={"steps": STEPS, "microbatch_size": 3, "num_microbatches": 4},
        checkpoint={"folder": str(tmp_path / "run"), "every_steps": 5, "resume": "auto"},
    )


@pytest.fixture
def start(config_path, tmp_path):
    """Start a run under a name of its own."""
    numbers = itertools.count()

    def start(name, *overrides, **options):
        paths = [f"checkpoint.folder={tmp_path / name}", f"train.log_path={tmp_path / name}.jsonl"]
        return start_training(["-c", str(config_path), *paths, *overrides], tmp_path / f"said-{next(numbers)}", **options)

    return start


@pytest.fixture
def train(start):
    """Run to the end; return the exit codes and what the ranks have said."""

    def train(*arguments, **options):
        with start(*arguments, **options) as job:
            return job.finish()

    return train


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path):
    keys = ("bits_per_byte", "learning_rate", "grad_norm", "updated")
    return {line["step"]: tuple(line[key] for key in keys) for line in lines(path) if line["kind"] == "step"}


def assert_same_run(tmp_path, name, other):
    found = compare(open_checkpoint(tmp_path / name), open_checkpoint(tmp_path / other))
    # Nobody draws from the global generators, and each process begins with its own.
    assert {one.name.split(".")[0] for one in found.tensors} <= {"rng"}, found
    assert found.values == ()
    assert open_checkpoint(tmp_path / name).step == STEPS
    assert steps_of(tmp_path / f"{name}.jsonl") == steps_of(tmp_path / f"{other}.jsonl")
    assert sorted(steps_of(tmp_path / f"{name}.jsonl")) == list(range(STEPS))


@pytest.mark.parametrize("mode", ["reduce_scatter", pytest.param("all_reduce", marks=pytest.mark.nightly)])
def test_killed_or_told_to_stop_and_resumed_is_one_run(train, tmp_path, mode):
    mode = [f"mode={mode}"]
    random_steps = random.Random(mode[0])
    codes, said = train("whole", *mode)
    assert codes == [0, 0], said

    # Some rank is killed, and the others find out; then some rank is told to stop, in a run that saves in the background.
    at = random_steps.randrange(6, 14)
    codes, said = train("run", *mode, acts=("SIGKILL", random_steps.randrange(2), at))
    assert min(codes) == -signal.SIGKILL, said
    assert 0 not in codes
    at = random_steps.randrange(14, STEPS - 1)
    acts = ("SIGTERM", random_steps.randrange(2), at)
    codes, said = train("run", *mode, "checkpoint.asynchronous=true", acts=acts)
    assert codes == [143, 143], said
    assert f"SIGTERM on rank {acts[1]}: step {at + 1} of {STEPS} is done and saved" in said[0]
    codes, said = train("run", *mode)
    assert codes == [0, 0], said

    assert_same_run(tmp_path, "run", "whole")
    resumed = [line["step"] for line in lines(tmp_path / "run.jsonl") if line["kind"] == "resume"]
    assert resumed[0] in {5, 10}
    assert resumed[1] == at + 1
    assert len(resumed) == 2


@pytest.mark.nightly
def test_killed_while_saving_in_the_background_goes_on_from_a_whole_checkpoint(train, tmp_path):
    background = ("checkpoint.asynchronous=true", "checkpoint.every_steps=1")
    codes, said = train("whole")
    assert codes == [0, 0], said

    for at in (7, 15):
        codes, said = train("run", *background, acts=("SIGKILL", at % 2, at))
        assert 0 not in codes, said
    codes, said = train("run", *background)
    assert codes == [0, 0], said

    assert_same_run(tmp_path, "run", "whole")


@pytest.mark.nightly
def test_another_number_of_ranks_sees_the_same_data_and_ends_nearby(train, tmp_path):
    """2 -> 3 -> 1 ranks, in both modes, with other buckets and microbatches: one run, up to rounding."""
    constant = ("optimizer.lr=0.001",)  # the larger rate lets rounding grow to what is not rounding any more
    codes, said = train("whole", *constant)
    assert codes == [0, 0], said

    codes, said = train("run", *constant, acts=("SIGTERM", 0, 7))
    assert codes == [143, 143], said
    codes, said = train(
        "run", *constant, "train.microbatch_size=2", "ddp.bucket_size=1000", num_ranks=3, acts=("SIGTERM", 2, 15)
    )
    assert codes == [143, 143, 143], said
    assert "saved by 2 rank(s)" in said[0]
    alone = ("mode=all_reduce", "train.microbatch_size=24", "train.num_microbatches=1")
    codes, said = train("run", *constant, *alone, num_ranks=1)
    assert codes == [0], said

    assert all(difference < 1e-4 for difference in differences_of_weights(tmp_path / "run", tmp_path / "whole"))
    codes, said = train("other", *constant, "train.seed=1")
    assert codes == [0, 0], said
    assert max(differences_of_weights(tmp_path / "other", tmp_path / "whole")) > 1e-2

    codes, said = train("run", *constant, num_ranks=3)
    assert codes == [2, 2, 2], said
    assert all("train.microbatch_size * train.num_microbatches * ranks: 24 in the checkpoint, 36 now" in text for text in said)


def differences_of_weights(first, second):
    tensors = compare(open_checkpoint(first), open_checkpoint(second)).tensors
    return [float(one.what.split()[-1]) for one in tensors if one.name.startswith("model.")]  # "..., by up to 1.2e-7"


def wait_for_step(path, step):
    """Wait until a step is in the log."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} was not made")


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.nightly)])
def test_a_signal_from_outside_to_every_rank_ends_all_with_its_code(start, tmp_path, name):
    """As a service manager sends it: twice, because a launcher passes on what it gets, too."""
    with start("run", "train.steps=1000000", "optimizer.final_lr_fraction=1") as job:
        wait_for_step(tmp_path / "run.jsonl", 8)
        job.signal(name)
        job.signal(name)
        codes, said = job.finish()

    assert codes == [128 + signal.Signals[name]] * 2, said
    stored = open_checkpoint(tmp_path / "run")
    stored.verify()
    assert f"{name} on rank 0: step {stored.step} of 1000000 is done and saved" in said[0]
    assert "Traceback" not in said[0] + said[1]
    assert lines(tmp_path / "run.jsonl")[-1]["kind"] == "stop"


@pytest.mark.nightly
def test_a_signal_to_torchrun_reaches_the_ranks_which_save(config_path, tmp_path):
    log, folder = tmp_path / "run.jsonl", tmp_path / "run"
    overrides = [f"checkpoint.folder={folder}", f"train.log_path={log}", "train.steps=1000000", "optimizer.final_lr_fraction=1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*launcher, "-m", "examples.bytegpt", "-c", str(config_path), *overrides],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for_step(log, 8)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)

    assert process.returncode != 0
    stored = open_checkpoint(folder)
    stored.verify()
    assert lines(log)[-1]["kind"] == "stop"
    assert lines(log)[-1]["step"] == stored.step
    assert f"step {stored.step} of 1000000 is done and saved" in said


@pytest.mark.nightly
def test_a_damaged_newest_checkpoint_ends_every_rank_with_its_code_and_the_steps_that_are_whole(train, tmp_path):
    codes, said = train("run", "checkpoint.keep_last=null", acts=("SIGTERM", 1, 11))
    assert codes == [143, 143], said
    path = next((tmp_path / "run" / "step-00000012").glob("rank-00001*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])

    codes, said = train("run")
    assert codes == [6, 6], said
    assert all("step-00000012" in text and "steps 5, 10 can be tried" in text for text in said)

    codes, said = train("run", "--resume", "10")
    assert codes == [0, 0], said
    assert open_checkpoint(tmp_path / "run").step == STEPS
