"""The report: its JSON form and the table for people."""

import io

from rich.console import Console

from megabucket.doctor import Line, Report, Verdict
from megabucket.doctor.report import describe_outcome, report_table


def a_line(probe="question", *, section="first", verdict=Verdict.HOLDS, answer="yes", ranks=()):
    return Line(section, probe, verdict, answer, "means something", ranks)


def a_report(*lines):
    return Report(backend="gloo", device="cpu", num_ranks=2, lines=lines, wall_s=1.5)


def printed(report):
    console = Console(file=io.StringIO(), width=160)
    console.print(report_table(report))
    return console.file.getvalue()


def cells(report):
    return [[cell.strip() for cell in row.split("│")[1:-1]] for row in printed(report).splitlines() if row.startswith("│")]


def test_the_json_form_holds_everything():
    report = a_report(a_line(), a_line("other", verdict=Verdict.FINDING, answer="no", ranks=(1,)))

    assert report.to_dict() == {
        "schema": 1,
        "is_healthy": False,
        "backend": "gloo",
        "device": "cpu",
        "num_ranks": 2,
        "wall_s": 1.5,
        "counts": {"holds": 1, "note": 0, "finding": 1, "not tried": 0},
        "lines": [
            {
                "section": "first",
                "probe": "question",
                "verdict": "holds",
                "answer": "yes",
                "meaning": "means something",
                "ranks": [],
            },
            {
                "section": "first",
                "probe": "other",
                "verdict": "finding",
                "answer": "no",
                "meaning": "means something",
                "ranks": [1],
            },
        ],
    }


def test_notes_and_what_was_not_tried_leave_a_report_healthy():
    report = a_report(a_line(), a_line(verdict=Verdict.NOTE), a_line(verdict=Verdict.NOT_TRIED))

    assert report.is_healthy
    assert describe_outcome(report) == (
        "everything that megabucket relies on holds (2 questions in 1.50 s, 1 not tried, 1 notes)"
    )


def test_a_finding_names_its_ranks_under_the_table():
    report = a_report(a_line(), a_line(verdict=Verdict.FINDING, ranks=(1,)), a_line(verdict=Verdict.FINDING, ranks=(0, 1)))

    assert describe_outcome(report) == (
        "2 findings about ranks 0, 1: do not train on this before it is cleared up (3 questions in 1.50 s, 0 not tried)"
    )


def test_a_row_is_verdict_question_answer_and_meaning():
    assert cells(a_report(a_line(verdict=Verdict.NOTE))) == [["note", "question", "yes", "means something"]]


def test_many_neighbours_that_say_the_same_are_one_row():
    lines = [a_line(f"path {i}") for i in range(6)]

    rows = cells(a_report(*lines, a_line("odd", answer="no"), a_line("path 7"), a_line("path 8", section="second")))

    assert [row[1] for row in rows] == ["path 0 ... path 5: 6 questions", "odd", "path 7", "path 8"]


def test_brackets_and_control_characters_of_a_back_end_s_message_are_printed_as_text():
    text = printed(a_report(a_line(answer="refused: [/red] bad\x1b[2J")))

    assert "[/red] bad\\x1b[2J" in text
    assert "\x1b" not in text
