import json

import pytest

from examples.bytegpt.report import MetricsLog
from megabucket.errors import ConfigError


def test_each_object_is_one_line_that_can_be_read_before_the_log_is_closed(tmp_path):
    path = tmp_path / "runs" / "log.jsonl"
    log = MetricsLog(path)

    log.write("evaluation", {"step": 0, "held_out_bits_per_byte": 8.0})
    log.write("note", {"text": "two\nlines"})

    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["schema"], first["kind"], first["step"], first["held_out_bits_per_byte"]) == (1, "evaluation", 0, 8.0)
    assert second["text"] == "two\nlines"
    assert first["monotonic_s"] <= second["monotonic_s"]
    assert first["wall_time_s"] > 1e9
    log.close()


def test_numbers_that_are_not_finite_are_written_as_text(tmp_path):
    path = tmp_path / "log.jsonl"
    log = MetricsLog(path)

    log.write("step", {"grad_norm": float("nan"), "bits": [float("inf"), -float("inf")]})
    log.close()

    written = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (written["grad_norm"], written["bits"]) == ("nan", ["inf", "-inf"])


def test_without_a_path_nothing_is_written(tmp_path):
    log = MetricsLog(None)
    log.write("step", {})
    log.close()

    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"train\.log_path=.*file/log\.jsonl' cannot be written"):
        MetricsLog(tmp_path / "file" / "log.jsonl")


@pytest.mark.parametrize("tail", ["", '{"kind": "st', "x" * 200_000], ids=["whole", "cut", "long"])
def test_a_log_that_goes_on_keeps_whole_lines(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    path.write_text("first\nsecond\n" + tail)
    log = MetricsLog(path)

    log.write("step", {})
    log.close()

    first, second, third = path.read_text().splitlines()
    assert (first, second, json.loads(third)["kind"]) == ("first", "second", "step")


@pytest.mark.parametrize("content", [None, "", "cut"])
def test_a_log_that_goes_on_from_nothing_is_empty(tmp_path, content):
    path = tmp_path / "runs" / "log.jsonl"
    if content is not None:
        path.parent.mkdir()
        path.write_text(content)

    log = MetricsLog(path)

    assert path.read_text() == ""
    log.close()


def test_a_log_can_begin_anew_when_it_turns_out_that_nothing_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("old\n")
    log = MetricsLog(path)

    log.start_anew()

    log.write("run", {})
    log.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["kind"] == "run"
