"""Calibrations: the line through measured times, what is said about it, the file, and the command under torchrun."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from launched import run_launched, run_script, torchrun
from typer.testing import CliRunner

from megabucket.cli.calibrate import _lines
from megabucket.cli.main import app
from megabucket.errors import ConfigError
from megabucket.measure.calibrate import Calibration, CalibrationPlan, measure_link, residuals
from megabucket.measure.collectives import Cell, Timing, sizes_up_to
from megabucket.measure.ranks import Ranks
from megabucket.planning.links import fit_affine, read_link, write_link
from megabucket.trace import CollectiveKind

KEY = (CollectiveKind.ALL_REDUCE, "float32")
FACTS = {"origin": "measured", "backend": "gloo", "device": "x86_64", "repetitions": 3}


def calibration_of(seconds_of, *, noise=(1.0,)):
    timings = [
        Timing(Cell(kind, "float32", size), tuple(seconds_of(size) * factor for factor in noise))
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
        for size in sizes_up_to(2**20)
    ]
    return Calibration.of(timings, 4, FACTS)


def remarks_of(calibration):
    return [text for name, text in calibration.link.facts.items() if name.startswith("remark ")]


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7), st.integers(0, 10))
def test_alpha_and_beta_are_recovered_from_noise_around_a_line(latency_s, seconds_per_byte, extreme):
    # The median of 1 - x, 1 and 1 + x is 1.
    noise = (1 - extreme / 20, 1.0, 1 + extreme / 20)
    calibration = calibration_of(lambda size: latency_s + seconds_per_byte * size, noise=noise)

    fit = fit_affine(calibration.link.tables[0].points)

    assert fit.latency_s == pytest.approx(latency_s, rel=1e-4, abs=1e-9)
    assert fit.seconds_per_byte == pytest.approx(seconds_per_byte, rel=1e-4, abs=1e-13)
    assert remarks_of(calibration) == []


def test_times_that_are_no_line_are_called_so_with_the_worst_size():
    # From 64 KiB on, another protocol with ten times the latency.
    calibration = calibration_of(lambda size: 1e-4 + 1e-9 * size if size < 2**16 else 1e-2)

    for remark, kind in zip(remarks_of(calibration), ("all_reduce", "all_gather"), strict=True):
        assert remark.startswith(f"{kind} of float32 is not latency plus bytes over bandwidth: the line is ")
        assert "use the table (kind: table), not the line" in remark
        worst = max(map(abs, residuals(calibration.link.tables[0])))
        assert f"{worst:.0%} off" in remark


def test_residuals_are_relative_to_the_measured_time_and_signed():
    timings = (Timing(Cell(*KEY, 1000), (1.0, 2.0, 3.0)), Timing(Cell(*KEY, 3000), (4.0,)))

    (table,) = Calibration.of(timings, 4, FACTS).link.tables

    assert table.points == ((1000.0, 2.0), (3000.0, 4.0))
    assert table.spread_s == ((1.5, 2.5), (4.0, 4.0))
    assert residuals(table) == pytest.approx((0.0, 0.0))  # two points are always on a line
    # Without a latency of less than nothing the line through these has none, and 1.2 s for each 1,000 bytes.
    assert residuals(table.model_copy(update={"points": ((1000.0, 1.0), (3000.0, 6.0))})) == pytest.approx((0.2, -0.4))


def test_the_file_is_the_link_that_the_planner_reads_with_everything_beside_it(tmp_path):
    calibration = calibration_of(lambda size: 1e-4 + 1e-9 * size if size < 2**16 else 1e-2, noise=(0.5, 1.0, 2.0))
    path = tmp_path / "new" / "link.yaml"

    write_link(path, calibration.link)

    assert read_link(path) == calibration.link
    written = yaml.safe_load(path.read_text())
    first, second = remarks_of(calibration)
    assert written["facts"] == FACTS | {"remark 1": first, "remark 2": second}
    table = written["tables"][0]
    assert (table["operation"], table["dtype"]) == ("all_reduce", "float32")
    assert table["spread_s"][0] == pytest.approx([0.75 * table["points"][0][1], 1.5 * table["points"][0][1]])


def test_the_lines_and_the_json_show_every_size():
    calibration = calibration_of(lambda size: 1e-4 + 1e-9 * size, noise=(0.5, 1.0, 2.0))

    wrote, *lines = _lines(calibration, Path("link.yaml"))
    data = json.loads(json.dumps(calibration.to_dict()))

    num_sizes = len(sizes_up_to(2**20))
    assert wrote == "wrote link.yaml; use it with: link: {path: link.yaml}"
    assert lines[:4] == [
        "gloo on x86_64, 4 ranks, 3 repetitions",
        "all_reduce float32: 100.0 us + bytes / (1 GB/s), median 0.0% off",
        "all_gather float32: 100.0 us + bytes / (1 GB/s), median 0.0% off",
        "",
    ]
    assert lines[4].split() == ["operation", "bytes", "median", "quartiles", "line"]
    assert len(lines) == 5 + 2 * num_sizes
    assert lines[5].replace("-0%", "+0%").split() == [
        "all_reduce",
        "float32",
        "1,024",
        "101.0",
        "us",
        "-25%",
        "+50%",
        "+0%",
    ]
    assert [len(each["points"]) for each in data["tables"]] == [num_sizes] * 2
    assert data["tables"][0]["seconds"][0] == list(calibration.timings[0].seconds)


def test_one_rank_is_refused():
    with pytest.raises(ConfigError, match="one rank sends nothing"):
        measure_link(CalibrationPlan(), Ranks())


@pytest.mark.parametrize(
    ("options", "text"),
    [("--repetitions 0", "--repetitions"), ("--max-bytes 6x", "'6x' is not a count; write 40000000, 4e7 or 40M")],
)
def test_numbers_out_of_range_are_refused(options, text):
    result = CliRunner().invoke(app, ["calibrate", *options.split()], env={"COLUMNS": "160"})

    assert result.exit_code == 2
    assert text in result.stderr


# Two commands in one pair of processes: starting them is what takes time.
COMMANDS = """
import json, os, sys, time
from pathlib import Path
from megabucket.cli.main import app

codes = []
for arguments in json.loads(sys.argv[1]):
    try:
        app(["calibrate", *arguments], prog_name="megabucket")
    except SystemExit as error:
        codes.append(int(error.code or 0))
    # The next command must not find the store of this one, which the first rank hosts at the same port.
    is_over = Path(sys.argv[0]).with_name(f"over-{len(codes)}")
    if os.environ["RANK"] == "0":
        is_over.touch()
    while not is_over.exists():
        time.sleep(0.01)
if os.environ["RANK"] == "0":
    print("codes", codes)
"""


@pytest.mark.dist
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["forked", "torchrun"])
def test_on_ranks_a_wrong_file_is_found_first_and_a_right_one_holds_a_usable_link(is_forked, tmp_path):
    script, out = tmp_path / "commands.py", tmp_path / "out" / "link.yaml"
    script.write_text(COMMANDS)
    few = ["--max-bytes", "20K", "--repetitions", "2", "fabric.latency_s=1e-3", "fabric.bytes_per_s=1e7"]
    commands = [
        ["--out", str(tmp_path), *few],
        ["--out", str(out), "--json", "--operation", "all_reduce", "--operation", "all_gather", "--dtype", "bfloat16", *few],
    ]

    text = json.dumps(commands)
    done = run_launched(run_script, (script, tmp_path, text), tmp_path / "said") if is_forked else torchrun(script, text)

    assert done.returncode == 0, done.stderr
    printed, _, codes = done.stdout.rpartition("codes ")
    assert json.loads(codes) == [2, 0]
    assert done.stderr.count(f"error: --out {tmp_path}: cannot be written: Is a directory") == 2  # on both ranks
    data = json.loads(printed)
    assert [(table["operation"], table["dtype"]) for table in data["tables"]] == [
        ("all_reduce", "bfloat16"),
        ("all_gather", "bfloat16"),
    ]
    assert data["facts"]["backend"] == "megabucket_fabric"
    assert data["facts"]["fabric_latency_s"] == 1e-3
    link = read_link(out)
    assert link.num_ranks == 2
    # The emulated link is never faster than it says: 2 x (1 ms + 10 KB at 10 MB/s), and half of that.
    for kind, passes in ((CollectiveKind.ALL_REDUCE, 2), (CollectiveKind.ALL_GATHER, 1)):
        assert link.collective_s(kind, 20_000, 2, "bfloat16") >= passes * (1e-3 + 1e-3)
