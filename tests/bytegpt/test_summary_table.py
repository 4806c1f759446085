import io
import json

import pytest
from rich.console import Console

from examples.bytegpt.metrics import StepMetrics
from examples.bytegpt.summary import Setup, Summary, Totals, summary_table
from megabucket.planning.memory import RankMemory


def summary(*, num_ranks=2, comm_s=0.2, updated=True):
    setup = Setup(
        mode="reduce_scatter",
        backend="gloo",
        num_ranks=num_ranks,
        num_params=1000,
        param_dtype="float32",
        num_buffers=1,
        num_buckets=3,
        padding_fraction=0.02,
        layout_fingerprint="f" * 64,
        computed_memory=RankMemory(parameter_bytes=4096, gradient_bytes=4096, moment_bytes=4096),
    )
    totals = Totals()
    for index in range(2):
        totals.add(
            StepMetrics(
                step=index,
                bits_per_byte=3.0 - index,
                learning_rate=0.1,
                grad_norm=1.0,
                updated=updated,
                reason="" if updated else "the gradient norm is nan",
                step_s=2.0,
                tokens_per_s=500.0,
                compute_s=1.5,
                comm_s=comm_s,
                exposed_s=comm_s / 4,
                overlap_fraction=0.75 if comm_s else None,
                num_collectives=7,
                payload_bytes=2048,
                wire_bytes=1024.0,
            )
        )
    return Summary(setup, totals, held_out_bits_before=8.0, held_out_bits_after=2.5, train_s=4.0, tokens_per_step=1000)


def rows(table):
    out = Console(file=io.StringIO(), width=200)
    out.print(table)
    cells = [line.strip("│\n").split("│") for line in out.file.getvalue().splitlines() if line.startswith("│")]
    return {name.strip(): (value.strip(), note.strip()) for name, value, note in cells}


def test_every_figure_of_the_table_is_a_mean_over_the_steps():
    table = rows(summary_table(summary()))

    assert {name: value for name, (value, _) in table.items()} == {
        "held-out bits/byte": "8.000 -> 2.500",
        "steps/s": "0.50",
        "buckets": "3",
        "collectives per step": "7.0",
        "bytes on the wire, formula": "1.00 KiB",
        "payload": "2.00 KiB",
        "communication time": "200.00 ms",
        "exposed communication": "50.00 ms",
        "overlap": "75%",
        "memory, computed": "12.00 KiB",
    }
    assert "2 steps in 4.00 s, 500 tokens/s over all ranks" in table["steps/s"][1]


def test_without_communication_no_overlap_is_claimed():
    table = rows(summary_table(summary(num_ranks=1, comm_s=0.0)))

    assert table["overlap"] == ("-", "no communication")


def test_steps_that_updated_nothing_are_counted():
    assert rows(summary_table(summary(updated=False)))["steps not updated"][0] == "2"
    assert "steps not updated" not in rows(summary_table(summary()))


def test_the_summary_as_data_is_json_and_has_the_same_figures():
    data = json.loads(json.dumps(summary().to_dict(), allow_nan=False))

    assert data["held_out_bits_after"] == 2.5
    assert data["steps_per_s"] == 0.5
    assert data["wire_bytes_per_step"] == 1024.0
    assert data["overlap_fraction"] == pytest.approx(0.75)
    assert data["computed_bytes"]["total_bytes"] == 12288
    assert data["last_bits_per_byte"] == 2.0
