"""Tables, and what is said when a command takes long."""

import time

import pytest

from megabucket.cli import output

ROWS = [["", "question", "what it means"], ["holds", "all-reduce SUM", "every rank is in the sum exactly once"]]


def test_a_number_is_never_cut_and_text_that_does_not_fit_beside_it_has_its_own_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    lines = list(output.text_table([["name", "count"], ["a" * 30, "1" * 40]]))

    assert lines == ["name", " " * 37 + "count", "a" * 30, "  " + "1" * 40]


PLANS = [["plan", "predicted, ms", "faster, rounds", ""], ["num_buckets 12", "92.42", "10 of 10", "model.down_proj.weight"]]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            69,
            [
                "plan            predicted, ms  faster, rounds",
                "num_buckets 12          92.42        10 of 10  model.down_proj.weight",
            ],
        ),
        (
            57,
            [
                "plan         predicted,   faster,",
                "                     ms    rounds",
                "num_buckets       92.42  10 of 10  model.down_proj.weight",
                "12",
            ],
        ),
        (
            56,
            [
                "plan",
                "  predicted, ms  faster, rounds",
                "num_buckets 12",
                "          92.42        10 of 10",
                "        model.down_proj.weight",
            ],
        ),
        (
            26,
            [
                "plan",
                "  predicted,   faster,",
                "          ms    rounds",
                "num_buckets 12",
                "       92.42  10 of 10",
                "        model.down_proj.weight",
            ],
        ),
    ],
)
def test_first_heads_break_then_text_between_words_then_text_has_its_own_lines(columns, lines, monkeypatch):
    monkeypatch.setattr(output, "output_width", lambda: columns)

    assert list(output.text_table(PLANS, num_folded=1)) == lines


def test_columns_of_text_beside_each_other_keep_their_words_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")

    rows = [["field", "reason"], ["average_in_collective=False:", "the mean is a sum that is scaled " * 3]]

    lines = list(output.text_table(rows, num_left=2))

    assert lines[1] == "average_in_collective=False:  the mean is a sum that is"


def test_a_row_without_numbers_is_its_text_alone(monkeypatch):
    monkeypatch.setattr(output, "output_width", lambda: 20)

    lines = list(output.text_table([["bucket", "from ... to"], ["0", "a" * 20], ["", "... 7 more"]], num_left=0, num_folded=1))

    assert lines == ["bucket", "        from ... to", "     0", " " * 8 + "a" * 20, "        ... 7 more"]


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
