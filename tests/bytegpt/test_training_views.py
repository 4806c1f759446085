import io

from rich.console import Console

from examples.bytegpt.metrics import StepMetrics
from examples.bytegpt.progress import LineView, LiveView, SilentView, describe_step, make_view


def step(index, **changes):
    fields = {
        "step": index,
        "bits_per_byte": 3.25,
        "learning_rate": 0.1,
        "grad_norm": 1.0,
        "updated": True,
        "reason": "",
        "step_s": 0.5,
        "tokens_per_s": 12345.6,
        "compute_s": 0.4,
        "comm_s": 0.1,
        "exposed_s": 0.0123,
        "overlap_fraction": 0.877,
        "num_collectives": 3,
        "payload_bytes": 100,
        "wire_bytes": 50.0,
    }
    return StepMetrics(**{**fields, **changes})


def console(*, is_terminal):
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=80)


def test_away_from_a_terminal_the_first_and_the_last_step_are_plain_lines():
    out = console(is_terminal=False)
    view = make_view(out)

    view.start(3, "train")
    for index in range(3):
        view.show(step(index))
    view.stop()

    assert isinstance(view, LineView)
    assert out.file.getvalue().splitlines() == [
        "train: step 1/3 3.250 bits/byte 12,346 tokens/s exposed 12.30 ms",
        "train: step 3/3 3.250 bits/byte 12,346 tokens/s exposed 12.30 ms",
    ]


def test_on_a_terminal_a_bar_shows_the_figures_of_the_last_step():
    out = console(is_terminal=True)
    view = make_view(out)

    view.start(2, "train")
    view.show(step(0))
    view.show(step(1, bits_per_byte=2.5))
    view.stop()
    view.stop()

    assert isinstance(view, LiveView)
    assert "2/2" in out.file.getvalue()
    assert "2.500 bits/byte 12,346 tokens/s exposed 12.30 ms" in out.file.getvalue()  # not cut at 80 columns


def test_notes_are_printed_as_they_are():
    out = console(is_terminal=False)

    make_view(out).note("corpus [stdlib]\n  train 3 files")

    assert out.file.getvalue() == "corpus [stdlib]\n  train 3 files\n"


def test_a_step_that_updated_nothing_says_why():
    text = describe_step(step(0, updated=False, reason="the gradient norm is nan"))

    assert text.endswith("NOT UPDATED: the gradient norm is nan")


def test_exposed_communication_is_not_claimed_where_none_was_seen():
    assert "exposed" not in describe_step(step(0, comm_s=0.0, exposed_s=0.0))


def test_the_silent_view_takes_everything():
    view = SilentView()

    view.note("x")
    view.start(1, "x")
    view.show(step(0))
    view.stop()
