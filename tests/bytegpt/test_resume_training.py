"""A run in one process: saved, ended in the middle, and gone on with as if nothing had happened."""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import megabucket as mb
from examples.bytegpt.model import ByteGPT
from examples.bytegpt.report import Progress
from examples.bytegpt.task import learning_rate
from examples.bytegpt.train import run_training
from megabucket.checkpoint.catalog import StepDirectory
from megabucket.checkpoint.offline import compare
from megabucket.checkpoint.save import BackgroundWriter, Content
from megabucket.checkpoint.stored import open_checkpoint
from megabucket.errors import (
    CheckpointInvalidError,
    CheckpointMissingError,
    CheckpointNotSavedError,
    ConfigError,
)
from megabucket.measure.ranks import Ranks
from megabucket.planning.model_config import GptConfig

ALONE = Ranks()
STEPS = 12
SCHEDULE = {"warmup_steps": 3, "final_lr_fraction": 0.1}


class CrashError(Exception):
    pass


@dataclass
class Acting(Progress):
    """Progress that does something when it hears of a step, and keeps what it is told."""

    at: int = -1
    act: object = None
    texts: list = field(default_factory=list)

    def note(self, text):
        self.texts.append(text)

    def show(self, title, figures, *, num_steps):
        if figures["step"] == self.at:
            self.act()


def crash():
    raise CrashError


def terminate(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def seed_generators(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def nothing_is_pending(monkeypatch):
    """What is done in the background is done when something happens."""
    start = BackgroundWriter._start

    def start_and_wait(writer, works, work):
        start(writer, works, work)
        wait([writer._result])

    monkeypatch.setattr(BackgroundWriter, "_start", start_and_wait)


@pytest.fixture
def run(tiny_run, tmp_path):
    """Train under a name of its own; ``checkpoint`` is the section, but for the folder."""

    def train(name="run", *, progress=None, steps=STEPS, compares=False, checkpoint=None, **sections):
        config = tiny_run(
            optimizer=SCHEDULE | sections.pop("optimizer", {}),
            train={"steps": steps, "log_path": str(tmp_path / f"{name}.jsonl"), **sections.pop("train", {})},
            **sections,
        )
        section = {"folder": str(tmp_path / name), "every_steps": 5, "resume": "auto", **(checkpoint or {})}
        # A process that goes on has other random numbers, and must take back those of the one before.
        seed_generators(1 if section["resume"] == "never" or not (tmp_path / name).exists() else 77)
        data = config.model_dump(exclude_unset=True)
        config = type(config).model_validate({**data, "program": {**data["program"], "checkpoint": section}})
        return run_training(config, ALONE, progress=progress or Progress(), compares=compares)

    return train


@pytest.fixture
def log(tmp_path):
    def read(name="run"):
        return [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]

    return read


def steps_of(lines):
    """What each step has computed; the last line of a step counts."""
    keys = ("bits_per_byte", "learning_rate", "grad_norm", "updated")
    return {line["step"]: tuple(line[key] for key in keys) for line in lines if line["kind"] == "step"}


def steps_in(folder):
    return sorted(parsed.step for path in Path(folder).iterdir() if (parsed := StepDirectory.parse(path.name)))


def assert_same_end(tmp_path, first, second):
    found = compare(open_checkpoint(tmp_path / first), open_checkpoint(tmp_path / second))
    assert found.is_equal, found


def test_a_run_in_another_thread_saves_and_leaves_signals_alone(run, tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:  # as Ray Train calls it; Python allows handlers in the main thread only
        thread.submit(run, steps=2).result()

    assert steps_in(tmp_path / "run") == [2]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.usefixtures("nothing_is_pending")
def test_a_crashed_run_goes_on_bit_by_bit(run, log, tmp_path, is_sharded, dtype, asynchronous):
    sections = {"ddp": {"use_distributed_optimizer": is_sharded}, "model": {"dtype": dtype}}
    checkpoint = {"asynchronous": asynchronous}
    run("whole", **sections)

    with pytest.raises(CrashError):
        run(progress=Acting(at=8, act=crash), checkpoint=checkpoint, **sections)
    report = run(checkpoint=checkpoint, **sections)

    assert_same_end(tmp_path, "run", "whole")
    assert steps_of(log()) == steps_of(log("whole"))
    assert report.summary["num_steps"] == STEPS - 5
    assert [line["step"] for line in log() if line["kind"] == "resume"] == [5]
    assert report.summary["held_out_bits_after"] == log("whole")[-1]["held_out_bits_after"]


@pytest.mark.parametrize(
    "optimizer", [{"name": "sgd", "momentum": 0.9}, {"name": "adam", "weight_decay": 0.0}, {"name": "muon"}]
)
def test_with_every_optimizer(run, log, tmp_path, optimizer):
    run("whole", optimizer=optimizer)

    with pytest.raises(CrashError):
        run(progress=Acting(at=6, act=crash), optimizer=optimizer)
    run(optimizer=optimizer)

    assert_same_end(tmp_path, "run", "whole")


@pytest.mark.parametrize("at", [0, 3, 4, 9])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_run_after_a_step_that_is_saved(run, log, tmp_path, at, name):
    run("whole")

    progress = Acting(at=at, act=lambda: terminate(signal.Signals[name]))
    report = run(progress=progress)
    stopped_at = log()[-1]
    run()

    assert report.summary is None
    assert (report.stopped.signal, report.stopped.rank) == (name, 0)
    assert at < report.stopped.step <= at + 3  # a step is shown one step later, and its fence was sent before
    assert (stopped_at["kind"], stopped_at["step"], stopped_at["signal"]) == ("stop", report.stopped.step, name)
    assert f"{name} on rank 0: step {report.stopped.step} of 12 is done and saved" in progress.texts[-1]
    assert_same_end(tmp_path, "run", "whole")
    assert steps_of(log()) == steps_of(log("whole"))


def test_a_stop_leaves_no_line_of_a_step_twice(run, log):
    run(progress=Acting(at=3, act=terminate))
    run()

    assert [line["step"] for line in log() if line["kind"] == "step"] == list(range(STEPS))


def test_the_log_has_all_steps_of_a_checkpoint_before_that_is_there(run, log, tmp_path, monkeypatch):
    def rate_or_crash(config, *, step, num_steps):
        return crash() if step == 5 else learning_rate(config, step=step, num_steps=num_steps)

    monkeypatch.setattr("examples.bytegpt.task.learning_rate", rate_or_crash)
    with pytest.raises(CrashError):  # as the first thing behind the save
        run()

    assert open_checkpoint(tmp_path / "run").step == 5
    assert [line["step"] for line in log() if line["kind"] == "step"] == list(range(5))


def test_without_a_folder_nothing_is_saved_and_a_signal_is_left_alone(run, tmp_path):
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("ours"))
    try:
        report = run(progress=Acting(at=3, act=terminate), checkpoint={"folder": None, "resume": "never"})
    finally:
        signal.signal(signal.SIGTERM, before)

    assert got == ["ours"]
    assert report.summary["num_steps"] == STEPS
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "saved", "kept"),
    [
        ({"every_steps": 5, "keep_last": None}, [5, 10, 12], [5, 10, 12]),
        ({"every_steps": 4, "keep_last": 2}, [4, 8, 12], [8, 12]),
        ({"every_steps": None}, [12], [12]),
        ({"every_steps": 3, "asynchronous": True, "keep_last": None}, [3, 6, 9, 12], [3, 6, 9, 12]),
    ],
)
def test_what_is_saved_and_what_stays(run, log, tmp_path, section, saved, kept):
    run(checkpoint=section)

    assert [line["step"] for line in log() if line["kind"] == "checkpoint"] == saved
    assert steps_in(tmp_path / "run") == kept


def test_a_finished_run_has_nothing_left_to_do(run, log):
    run()
    lines, progress = log(), Acting()

    report = run(progress=progress)

    assert (report.summary, report.stopped) == (None, None)
    assert "nothing left to train" in progress.texts[-1]
    assert log()[: len(lines)] == lines
    with pytest.raises(ConfigError, match="nothing to train and to compare"):
        run(compares=True)


def test_auto_begins_anew_where_nothing_was_saved_and_replaces_the_log(run, log, tmp_path):
    (tmp_path / "run.jsonl").write_text('{"kind": "of another run"}\n')

    run()

    assert [line["kind"] for line in log()[:2]] == ["run", "evaluation"]


def test_a_line_that_was_not_written_whole_goes(run, log, tmp_path):
    with pytest.raises(CrashError):
        run(progress=Acting(at=8, act=crash))
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')

    run()

    assert len([line for line in log() if line["kind"] == "resume"]) == 1


def test_a_run_that_begins_anew_is_not_mixed_with_an_old_one(run):
    run(steps=5)

    with pytest.raises(ConfigError, match=r"holds checkpoints \(of steps \(5,\)\).*--resume auto, or name another folder"):
        run(checkpoint={"resume": "never"})


@pytest.fixture
def damaged(run, tmp_path):
    """A run with checkpoints of steps 5 and 10, of which the newer one has a flipped bit."""
    with pytest.raises(CrashError):
        run(progress=Acting(at=10, act=crash), checkpoint={"keep_last": None})
    path = next((tmp_path / "run" / "step-00000010").glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_a_damaged_newest_checkpoint_is_an_error_that_lists_the_others(run, damaged):
    with pytest.raises(CheckpointInvalidError, match=r"step-00000010.*step 5"):
        run()


def test_a_folder_that_cannot_be_looked_into_is_not_an_empty_one(run, tmp_path):
    (tmp_path / "run").write_text("a file")

    with pytest.raises(NotADirectoryError):
        run()


def test_a_latest_that_names_nothing_is_not_a_new_run(run, tmp_path):
    run(steps=5)
    (tmp_path / "run" / "step-00000005").rename(tmp_path / "elsewhere")

    with pytest.raises(CheckpointMissingError, match="no checkpoint for step 5"):
        run()


def test_a_damaged_latest_is_an_error_and_a_lost_one_is_not_needed(run, tmp_path):
    run("whole")
    run(progress=Acting(at=6, act=terminate))
    latest = tmp_path / "run" / "latest"
    latest.write_text("nonsense\n")
    with pytest.raises(CheckpointInvalidError, match=r"latest.*steps 5, "):
        run()

    latest.unlink()
    run()

    assert_same_end(tmp_path, "run", "whole")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_going_back_to_an_earlier_step_saves_the_later_ones_again(run, tmp_path, asynchronous):
    run(checkpoint={"keep_last": None})
    run("whole")

    run(checkpoint={"resume": 5, "keep_last": None, "asynchronous": asynchronous})

    assert {path.name for path in (tmp_path / "run").glob("step*")} >= {"step-00000010.2", "step-00000012.2"}
    assert open_checkpoint(tmp_path / "run").path.name == "step-00000012.2"
    assert_same_end(tmp_path, "run", "whole")


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(run):
    run(checkpoint={"keep_last": None})

    with pytest.raises(CheckpointMissingError, match="steps 5, 10, 12"):
        run(checkpoint={"resume": 7})


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"train": {"microbatch_size": 3}}, r"microbatch_size \* train.num_microbatches \* ranks: 4 in the checkpoint, 6 now"),
        ({"train": {"seed": 1}}, "train.seed: 0 in the checkpoint, 1 now"),
        ({"optimizer": {"lr": 0.5, "muon_lr": 0.5}}, "optimizer.lr: 0.01 in the checkpoint, 0.5 now"),
        ({"data": {"held_out_every": 3}}, r"the corpus \(SHA-256\)"),
        ({"steps": 20}, "train.steps: 12 in the checkpoint, 20 now"),
    ],
    ids=["batch", "seed", "lr", "corpus", "steps"],
)
def test_a_config_of_another_run_is_refused_by_name(run, sections, named):
    run(progress=Acting(at=6, act=terminate))

    with pytest.raises(ConfigError, match=named) as caught:
        run(**sections)

    assert len(caught.value.problems) == 1


def test_the_same_batch_in_other_microbatches_is_the_same_run(run):
    run(progress=Acting(at=6, act=terminate))

    report = run(train={"microbatch_size": 4, "num_microbatches": 1})

    assert report.summary["num_steps"] > 0


def test_a_longer_run_with_a_constant_rate_is_the_same_run(run, tmp_path):
    constant = {"final_lr_fraction": 1.0}
    run("whole", steps=15, optimizer=constant)
    run(optimizer=constant)

    run(steps=15, optimizer=constant)

    assert_same_end(tmp_path, "run", "whole")


def test_a_shorter_run_than_the_checkpoint_is_refused(run):
    run(optimizer={"final_lr_fraction": 1.0})

    with pytest.raises(ConfigError, match=r"is of step 12, and train\.steps=7 ends before"):
        run(steps=7, optimizer={"final_lr_fraction": 1.0})


def test_a_resumed_run_can_be_compared_with_a_reference_that_had_no_break(run):
    run(progress=Acting(at=6, act=terminate))

    comparison = run(compares=True).comparison

    assert comparison.max_abs_difference == 0


@pytest.fixture
def full_at(monkeypatch):
    """Let the saves of some steps fail as on a full disk."""
    write = Content.write

    def fill(*steps):
        def fail_or_write(content, file_system, directory):
            written = write(content, file_system, directory)
            if any(f"step-{step:08d}" in directory.name for step in steps):
                raise OSError(28, "No space left on device")
            return written

        monkeypatch.setattr(Content, "write", fail_or_write)

    return fill


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_ends_the_run_and_the_one_before_stays(run, full_at, tmp_path, asynchronous):
    full_at(10)

    with pytest.raises(CheckpointNotSavedError, match=r"step 10: .*No space left on device"):
        run(checkpoint={"asynchronous": asynchronous})

    assert open_checkpoint(tmp_path / "run").step == 5


def test_a_checkpoint_of_another_program_is_refused(run, tmp_path):
    sizes = GptConfig(kind="gpt", vocab_size=256, sequence_length=16, num_layers=1, hidden_size=16, num_heads=2)
    model = mb.DistributedDataParallel(ByteGPT(sizes, seed=0))
    groups = [
        {"params": [param for param in model.parameters() if (param.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    mb.save_checkpoint(tmp_path / "run", model, mb.DistributedOptimizer(torch.optim.AdamW(groups), model), step=3)

    with pytest.raises(ConfigError, match="was not saved by the demo"):
        run()
