import json
from dataclasses import dataclass, field

import pytest
import torch

from examples.bytegpt.compare import describe_comparison
from examples.bytegpt.config import DemoConfig
from examples.bytegpt.data import CorpusError
from examples.bytegpt.report import Progress, describe_summary, jsonable
from examples.bytegpt.task import trainable_model
from examples.bytegpt.train import run_training
from megabucket.errors import ConfigError, NonFiniteGradientError
from megabucket.measure.ranks import Ranks

ALONE = Ranks()


@dataclass
class Notes(Progress):
    """Progress that keeps what it was told."""

    texts: list = field(default_factory=list)
    steps: list = field(default_factory=list)

    def note(self, text):
        self.texts.append(text)

    def show(self, title, figures, *, num_steps):
        self.steps.append(figures)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
def test_one_process_learns_without_a_launcher(tiny_run, tmp_path, mode):
    config = tiny_run(train={"steps": 60}, ddp={"use_distributed_optimizer": mode == "reduce_scatter"})

    report = run_training(config, ALONE, progress=Progress())

    summary = report.summary
    assert summary["held_out_bits_after"] < summary["held_out_bits_before"] - 2
    assert summary["mode"] == mode
    assert summary["num_buckets"] > 1
    assert summary["num_collectives_per_step"] == 0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
def test_each_optimizer_has_its_own_learning_rate_on_one_schedule(tiny_run, monkeypatch, mode):
    seen = []
    for kind in (torch.optim.Muon, torch.optim.AdamW):
        monkeypatch.setattr(kind, "step", noting_rates(kind.step, seen))
    config = tiny_run(
        ddp={"use_distributed_optimizer": mode == "reduce_scatter"},
        optimizer={"name": "muon", "lr": 0.1, "muon_lr": 0.4, "warmup_steps": 2},
    )

    run_training(config, ALONE, progress=Progress())

    assert seen == [("Muon", 0.2), ("AdamW", 0.05), ("Muon", 0.4), ("AdamW", 0.1), ("Muon", 0.4), ("AdamW", 0.1)]


def noting_rates(step, seen):
    def note_and_step(optimizer):
        seen.append((type(optimizer).__name__, optimizer.param_groups[0]["lr"]))
        return step.__wrapped__(optimizer)

    return note_and_step


def test_the_log_has_the_run_each_step_both_evaluations_and_the_summary(tiny_run, tmp_path):
    report = run_training(tiny_run(), ALONE, progress=Progress())

    written = lines(tmp_path / "runs" / "log.jsonl")
    assert [line["kind"] for line in written] == ["run", "evaluation", "step", "step", "step", "evaluation", "summary"]
    assert [line["step"] for line in written if line["kind"] == "step"] == [0, 1, 2]
    assert DemoConfig.model_validate(written[0]["config"] | {"mode": None}).program.train.steps == 3
    assert " 9 files" in written[0]["corpus"][1]  # 12 files, every 4th held out
    assert written[-1]["held_out_bits_after"] == report.summary["held_out_bits_after"]


def test_progress_hears_of_the_corpus_and_of_every_step_in_order(tiny_run):
    progress = Notes()

    run_training(tiny_run(), ALONE, progress=progress)

    assert "SHA-256" in progress.texts[0]
    assert [figures["step"] for figures in progress.steps] == [0, 1, 2]
    assert all(figures["compute_s"] > 0 for figures in progress.steps)


def test_the_same_seed_gives_the_same_run_to_the_last_bit(tiny_run):
    first, second, other = (
        run_training(tiny_run(train={"seed": seed}), ALONE, progress=Progress()).summary for seed in (5, 5, 6)
    )

    assert first["held_out_bits_after"] == second["held_out_bits_after"]
    assert first["held_out_bits_after"] != other["held_out_bits_after"]


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "adam", "fused": True}, {"name": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("clip_grad", [0.0, 0.1])
def test_one_process_ends_exactly_where_plain_torch_ends(tiny_run, optimizer, is_sharded, clip_grad):
    optimizer = {**optimizer, "clip_grad": clip_grad}
    config = tiny_run(optimizer=optimizer, ddp={"use_distributed_optimizer": is_sharded}, train={"steps": 6})

    comparison = run_training(config, ALONE, progress=Progress(), compares=True).comparison

    assert comparison.max_abs_difference == 0
    assert comparison.held_out_bits[0] == comparison.held_out_bits[1]
    assert comparison.reference.startswith("plain torch")
    assert "all weights are equal" in describe_comparison(comparison)


def test_a_comparison_in_bfloat16_says_what_is_compared(tiny_run):
    config = tiny_run(model={"dtype": "bfloat16"})

    report = run_training(config, ALONE, progress=Progress(), compares=True)

    assert "rounds float32 main parameters" in report.comparison.note


# Such a rate makes the weights of the first step overflow, and the gradients of all later ones.
OVERFLOWING = {"name": "sgd", "lr": 1e38, "clip_grad": 0.0}


@pytest.mark.parametrize(("policy", "reason"), [("allow", "gradient norm"), ("skip_step", "has nan in 16 of 16 elements")])
def test_a_step_without_finite_gradients_is_counted_and_changes_nothing(tiny_run, tmp_path, policy, reason):
    config = tiny_run(optimizer=OVERFLOWING, ddp={"nonfinite_gradients": policy})

    report = run_training(config, ALONE, progress=Progress())

    steps = [line for line in lines(tmp_path / "runs" / "log.jsonl") if line["kind"] == "step"]
    assert report.summary["num_skipped"] == sum(not line["updated"] for line in steps) > 0
    assert reason in steps[-1]["reason"]
    json.dumps(jsonable(report.summary), allow_nan=False)


def test_by_default_a_step_without_finite_gradients_ends_the_run(tiny_run):
    with pytest.raises(NonFiniteGradientError, match=r"step 1: the gradient of 'final_norm\.bias' on rank 0"):
        run_training(tiny_run(optimizer=OVERFLOWING), ALONE, progress=Progress())


def test_the_closing_table_has_every_figure_once(tiny_run):
    table = describe_summary(run_training(tiny_run(), ALONE, progress=Progress()).summary).splitlines()

    names = ["held-out bits/byte", "steps/s", "buckets", "collectives per step"]
    names += ["bytes on the wire, formula", "payload", "communication time", "exposed communication", "overlap"]
    assert table[0] == "all_reduce, 1 rank(s), none, float32 parameters"
    assert [line.strip().startswith(name) for line, name in zip(table[1:], names, strict=True)] == [True] * len(names)
    assert "3 steps in " in table[2]
    assert table[-1].endswith("no communication")


def test_without_a_log_path_nothing_is_written(tiny_run, tmp_path):
    run_training(tiny_run(train={"log_path": None}), ALONE, progress=Progress())

    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_cannot_be_read_ends_the_run(tiny_run):
    with pytest.raises(CorpusError, match="does not exist"):
        run_training(tiny_run(data={"corpus": "/missing"}), ALONE, progress=Progress())


def test_held_out_files_too_short_for_one_window_are_refused(tiny_run):
    with pytest.raises(CorpusError, match="too few for one window of 60000 bytes"):
        run_training(tiny_run(model={"sequence_length": 60000}), ALONE, progress=Progress())


def test_a_summed_gradient_cannot_be_compared_with_torch(tiny_run):
    with pytest.raises(ConfigError, match="always takes the mean"):
        run_training(tiny_run(ddp={"grad_reduction": "sum"}), ALONE, progress=Progress(), compares=True)


def test_training_needs_a_model_section():
    with pytest.raises(ConfigError, match="there is no model section"):
        trainable_model(DemoConfig())


def test_only_a_gpt_can_be_trained():
    config = DemoConfig.model_validate({"model": {"kind": "params", "params": [{"name": "w", "shape": [2]}]}})

    with pytest.raises(ConfigError, match=r"model\.kind is 'params'"):
        trainable_model(config)


def test_a_vocabulary_without_room_for_bytes_is_refused(tiny_run):
    with pytest.raises(ConfigError, match="vocab_size=255"):
        trainable_model(tiny_run(model={"vocab_size": 255}))


def test_a_dtype_that_needs_loss_scaling_is_refused(tiny_run):
    with pytest.raises(ConfigError, match=r"model\.dtype=float16 cannot be trained here"):
        trainable_model(tiny_run(model={"dtype": "float16"}))
