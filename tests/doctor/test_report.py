"""The report as data and as one sentence."""

from megabucket.doctor import DoctorReport, Line, Status


def a_line(question="question", *, status=Status.HOLDS, answer="yes", ranks=()):
    return Line(question, status, answer, "means something", ranks)


def a_report(*lines):
    return DoctorReport(backend="gloo", device="cpu", num_ranks=2, lines=lines, wall_s=1.5)


def test_the_json_form_holds_everything():
    report = a_report(a_line(), a_line("other", status=Status.FINDING, answer="no", ranks=(1,)))

    first = {"question": "question", "status": "holds", "answer": "yes", "meaning": "means something", "ranks": []}
    first |= {"hosts": "", "advice": ""}
    assert report.to_dict() == {
        "schema": 1,
        "is_healthy": False,
        "backend": "gloo",
        "device": "cpu",
        "num_ranks": 2,
        "wall_s": 1.5,
        "hosts": [],
        "lines": [first, {**first, "question": "other", "status": "finding", "answer": "no", "ranks": [1]}],
    }


def test_notes_leave_a_report_healthy():
    report = a_report(a_line(), a_line(status=Status.NOTE))

    assert report.is_healthy
    assert report.outcome == "everything that megabucket relies on holds (2 questions in 1.50 s; notes: 1)"


def test_the_outcome_names_the_ranks_of_findings():
    report = a_report(a_line(), a_line(status=Status.FINDING, ranks=(1,)), a_line(status=Status.FINDING, ranks=(0, 1)))

    assert report.outcome == "2 findings about ranks 0, 1: do not train before it is cleared up (3 questions in 1.50 s)"
