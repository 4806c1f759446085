from examples.bytegpt.report import Progress, describe_step

STEP = {"bits_per_byte": 3.25, "updated": True, "reason": "", "tokens_per_s": 12345.6, "comm_s": 0.1, "exposed_s": 0.0123}


def test_the_first_and_the_last_step_are_lines_on_stderr(capsys):
    progress = Progress(is_shown=True)

    for step in range(3):
        progress.show("train", {**STEP, "step": step}, num_steps=3)

    assert capsys.readouterr().err.splitlines() == [
        "train: step 1/3 3.250 bits/byte 12,346 tokens/s exposed 12.30 ms",
        "train: step 3/3 3.250 bits/byte 12,346 tokens/s exposed 12.30 ms",
    ]


def test_another_rank_shows_nothing(capsys):
    progress = Progress()

    progress.note("x")
    progress.show("train", {**STEP, "step": 0}, num_steps=3)

    assert capsys.readouterr().err == ""


def test_a_step_that_updated_nothing_says_why():
    text = describe_step({**STEP, "updated": False, "reason": "the gradient norm is nan"})

    assert text.endswith("NOT UPDATED: the gradient norm is nan")


def test_exposed_communication_is_not_claimed_where_none_was_seen():
    assert "exposed" not in describe_step({**STEP, "comm_s": 0.0, "exposed_s": 0.0})
