"""A short soak over all kinds of fault, and the parts of the soak itself.

The long one is a program: ``python -m megabucket.chaos.loopback_soak --steps 100000 --seed 0``.
"""

import pytest
import torch
import typer

from megabucket.chaos.loopback_soak.__main__ import main
from megabucket.chaos.loopback_soak.drafts import Maker
from megabucket.chaos.loopback_soak.judge import Verdict
from megabucket.chaos.loopback_soak.kinds import KINDS
from megabucket.chaos.loopback_soak.replay import describe_program, replay, shrink
from megabucket.chaos.loopback_soak.soak import SoakedWorld, all_kinds, run_loopback_soak
from megabucket.chaos.loopback_soak.turns import Turns, TurnsCommunicator
from megabucket.chaos.loopback_soak.worlds import draw_world
from megabucket.comm import AllReduce
from megabucket.ddp.step import GradSync
from megabucket.errors import CollectiveDeadlockError
from megabucket.testing import LoopbackWorld

SEED = 0


def test_in_every_step_the_numbers_are_right_or_all_ranks_raise_the_expected_error():
    counts = run_loopback_soak(300, SEED, max_failures=3, report=print)  # pytest shows it when the test fails

    assert [failure.describe() for failure in counts.failures] == []
    assert counts.num_steps >= 300
    assert set(counts.by_verdict) == {"RIGHT", "NAMED"}
    assert sum(counts.errors.values()) > 50


def test_the_same_seed_gives_the_same_worlds_faults_and_verdicts():
    first, second = (run_loopback_soak(60, 3) for _ in range(2))

    assert (first.by_kind, first.errors, first.num_steps) == (second.by_kind, second.errors, second.num_steps)


@pytest.mark.parametrize("takes_turns", [True, False], ids=["in turns", "at the same time"])
def test_ranks_in_turns_and_ranks_at_the_same_time_come_to_the_same(takes_turns):
    counts = run_loopback_soak(40, 5, habits={"takes_turns": takes_turns})

    assert [failure.describe() for failure in counts.failures] == []


def test_every_kind_of_episode_is_drawn_sooner_or_later():
    drawn = set()
    for seed in range(30):
        for kind in all_kinds():
            maker = Maker(draw_world(seed))
            episode = KINDS[kind](maker) if kind in KINDS else None
            drawn |= {kind} if episode is not None else set()

    assert drawn == set(KINDS)


def test_a_failure_is_replayed_from_its_seed_and_cut_down_to_what_it_needs(monkeypatch):
    def forgets_the_sum(self, group, position):
        group.slots[position].param.grad = None  # a late gradient that nobody hears of

    monkeypatch.setattr(GradSync, "_note_late", forgets_the_sum)
    counts = run_loopback_soak(5_000, 1, max_failures=1)
    (failure,) = counts.failures

    again = replay(failure.world_seed)
    shortest = shrink(failure)

    assert again.describe() == failure.describe()
    assert again.judgement.verdict is Verdict.SILENT
    assert len(shortest) <= 2
    assert any("Backward" in line for line in describe_program(shortest))


def test_ranks_that_wait_for_ever_are_noticed_at_once():
    turns, world = Turns(2, seed=0), LoopbackWorld(2)

    def program(rank):
        communicator = TurnsCommunicator(world, rank, turns)
        if rank == 0:
            with pytest.raises(CollectiveDeadlockError, match=r"which rank\(s\) 1 have not launched"):
                communicator.launch([AllReduce(torch.ones(1))], label="alone").wait()
        return rank

    assert turns.run(program) == [0, 1]


def test_an_error_of_a_rank_in_turns_is_raised_to_the_caller():
    def program(rank):
        raise ValueError(f"rank {rank}")

    with pytest.raises(ValueError, match="rank"):
        Turns(2, seed=0).run(program)


def test_what_is_left_over_at_the_end_of_a_world_is_found():
    spec = draw_world(2, use_distributed_optimizer=False, overlap_param_gather=False)
    world = SoakedWorld(spec)

    assert world.find_leftovers() == ""

    world = SoakedWorld(spec)
    world._players[0].ddp.sync._agreement.step += 1  # one rank has counted a step more

    assert "steps {0, 1}" in world.find_leftovers()


def test_the_program_prints_seed_and_counts(capsys):
    num_threads = torch.get_num_threads()

    with pytest.raises(typer.Exit) as ended:
        main(steps=20, seed=4)

    torch.set_num_threads(num_threads)
    shown = capsys.readouterr().out
    assert ended.value.exit_code == 0
    assert "seed 4: " in shown
    assert "0 failures" in shown


def test_the_program_replays_one_world(capsys):
    with pytest.raises(typer.Exit) as ended:
        main(world=7)

    assert ended.value.exit_code == 0
    assert capsys.readouterr().out == "world 7 is fine\n"
