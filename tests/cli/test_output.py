"""Tables, and what is said when a command takes long."""

import time

import pytest

from megabucket.cli import output

ROWS = [["", "question", "what it means"], ["holds", "all-reduce SUM", "every rank is in the sum exactly once"]]


def test_a_table_of_numbers_is_never_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    lines = list(output.text_table([["a" * 30, "1" * 40]], num_left=1))

    assert lines == ["a" * 8 + "  " + "1" * 40, "a" * 8, "a" * 8, "a" * 6]


def test_columns_that_may_fold_share_what_room_there_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")

    assert list(output.text_table(ROWS, num_folded=2)) == [
        "       question        what it means",
        "holds  all-reduce SUM  every rank is in the",
        "                       sum exactly once",
    ]


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_folded_tables_keep_to_the_columns(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [[f"{number}", "word " * 20, "other-words " * 30] for number in range(5)]

    assert max(map(len, output.text_table(rows, num_folded=2))) <= columns


def test_a_sentence_that_does_not_fit_goes_on_in_the_next_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    output.print_lines(["short", "  Optimal cuts save 7.2% of a step: 9.48 ms of 131.1 ms."])

    assert capsys.readouterr().out.splitlines() == [
        "short",
        "  Optimal cuts save 7.2% of a step: 9.48",
        "    ms of 131.1 ms.",
    ]


def test_a_quick_command_says_nothing(capsys):
    report = output.progress()
    with output.notice_when_slow("working"):
        report("step 1")

    assert capsys.readouterr().err == ""


def test_a_slow_command_says_what_it_does_and_not_too_often(capsys, monkeypatch):
    monkeypatch.setattr(output, "_QUIET_S", 0.05)
    report = output.progress()
    with output.notice_when_slow("working"):
        time.sleep(0.3)
        report("step 1")
        report("step 2")

    assert capsys.readouterr().err == "working\nstep 1\n"
