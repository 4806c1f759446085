import json
from dataclasses import dataclass, field

import pytest
import torch

from examples.bytegpt.compare import describe_difference
from examples.bytegpt.config import DemoConfig
from examples.bytegpt.loop import run_training
from examples.bytegpt.progress import SilentView
from examples.bytegpt.task import trainable_model
from megabucket.errors import ConfigError, CorpusError, NonFiniteGradientError
from megabucket.measure.ranks import Launch

ALONE = Launch()


@dataclass
class Notes(SilentView):
    """A view that keeps what it was told."""

    texts: list = field(default_factory=list)
    steps: list = field(default_factory=list)

    def note(self, text):
        self.texts.append(text)

    def show(self, metrics):
        self.steps.append(metrics)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
def test_one_process_learns_without_a_launcher(tiny_run, tmp_path, mode):
    config = tiny_run(train={"steps": 60}, ddp={"use_distributed_optimizer": mode == "reduce_scatter"})

    report = run_training(config, launch=ALONE, view=SilentView())

    summary = report.summary
    assert summary.held_out_bits_after < summary.held_out_bits_before - 2
    assert report.summary.setup.mode == mode
    assert report.summary.setup.num_buckets > 1
    assert report.summary.totals.num_collectives == 0
    assert not torch.distributed.is_initialized()


def test_the_log_has_the_run_each_step_both_evaluations_and_the_summary(tiny_run, tmp_path):
    report = run_training(tiny_run(), launch=ALONE, view=SilentView())

    written = lines(tmp_path / "runs" / "log.jsonl")
    assert [line["kind"] for line in written] == ["run", "evaluation", "step", "step", "step", "evaluation", "summary"]
    assert [line["step"] for line in written if line["kind"] == "step"] == [0, 1, 2]
    assert DemoConfig.model_validate(written[0]["config"] | {"mode": None}).program.train.steps == 3
    assert written[0]["corpus"]["train"]["num_files"] == 9  # 12 files, every 4th held out
    assert written[-1]["held_out_bits_after"] == report.summary.held_out_bits_after


def test_the_view_hears_of_the_corpus_and_of_every_step_in_order(tiny_run):
    view = Notes()

    run_training(tiny_run(), launch=ALONE, view=view)

    assert "SHA-256" in view.texts[0]
    assert [metrics.step for metrics in view.steps] == [0, 1, 2]
    assert all(metrics.compute_s > 0 for metrics in view.steps)


def test_the_same_seed_gives_the_same_run_to_the_last_bit(tiny_run):
    first, second, other = (
        run_training(tiny_run(train={"seed": seed}), launch=ALONE, view=SilentView()).summary for seed in (5, 5, 6)
    )

    assert first.held_out_bits_after == second.held_out_bits_after
    assert first.held_out_bits_after != other.held_out_bits_after


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "adam", "fused": True}, {"name": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("clip_grad", [0.0, 0.1])
def test_one_process_ends_exactly_where_plain_torch_ends(tiny_run, optimizer, is_sharded, clip_grad):
    optimizer = {**optimizer, "clip_grad": clip_grad}
    config = tiny_run(optimizer=optimizer, ddp={"use_distributed_optimizer": is_sharded}, train={"steps": 6})

    comparison = run_training(config, launch=ALONE, view=SilentView(), compares=True).comparison

    assert comparison.max_abs_difference == 0
    assert comparison.held_out_bits[0] == comparison.held_out_bits[1]
    assert comparison.reference.startswith("plain torch")
    assert ("summed in float64" in comparison.note) == (clip_grad > 0)
    assert "all weights are equal" in describe_difference(comparison)


def test_a_comparison_in_bfloat16_says_what_is_compared(tiny_run):
    config = tiny_run(model={"dtype": "bfloat16"})

    report = run_training(config, launch=ALONE, view=SilentView(), compares=True)

    assert report.summary.setup.computed_memory.main_parameter_bytes > 0
    assert "rounds float32 main parameters" in report.comparison.note


def test_the_trace_of_the_last_step_is_written(tiny_run, tmp_path):
    path = tmp_path / "traces" / "last.json"

    run_training(tiny_run(train={"trace_path": str(path)}), launch=ALONE, view=SilentView())

    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names.count("step 2") == 1
    assert names.count("forward") == names.count("backward") == 2  # two microbatches
    assert names.count("optimizer") == 1


# Such a rate makes the weights of the first step overflow, and the gradients of all later ones.
OVERFLOWING = {"name": "sgd", "lr": 1e38, "clip_grad": 0.0}


@pytest.mark.parametrize(("policy", "reason"), [("allow", "gradient norm"), ("skip_step", "has nan in 16 of 16 elements")])
def test_a_step_without_finite_gradients_is_counted_and_changes_nothing(tiny_run, tmp_path, policy, reason):
    config = tiny_run(optimizer=OVERFLOWING, ddp={"nonfinite_gradients": policy})

    report = run_training(config, launch=ALONE, view=SilentView())

    steps = [line for line in lines(tmp_path / "runs" / "log.jsonl") if line["kind"] == "step"]
    assert report.summary.totals.num_skipped == sum(not line["updated"] for line in steps) > 0
    assert reason in steps[-1]["reason"]
    json.dumps(report.to_dict(), allow_nan=False)


def test_by_default_a_step_without_finite_gradients_ends_the_run(tiny_run):
    with pytest.raises(NonFiniteGradientError, match=r"step 1: the gradient of 'final_norm\.bias' on rank 0"):
        run_training(tiny_run(optimizer=OVERFLOWING), launch=ALONE, view=SilentView())


def test_without_a_log_path_nothing_is_written(tiny_run, tmp_path):
    run_training(tiny_run(train={"log_path": None}), launch=ALONE, view=SilentView())

    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_cannot_be_read_ends_the_run(tiny_run):
    with pytest.raises(CorpusError, match="does not exist"):
        run_training(tiny_run(data={"corpus": "/missing"}), launch=ALONE, view=SilentView())


def test_held_out_files_too_short_for_one_window_are_refused(tiny_run):
    with pytest.raises(CorpusError, match="too few for one window of 60000 bytes"):
        run_training(tiny_run(model={"sequence_length": 60000}), launch=ALONE, view=SilentView())


def test_a_summed_gradient_cannot_be_compared_with_torch(tiny_run):
    with pytest.raises(ConfigError, match="always takes the mean"):
        run_training(tiny_run(ddp={"grad_reduction": "sum"}), launch=ALONE, view=SilentView(), compares=True)


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
