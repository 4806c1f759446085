"""What is found when a backward begins: gradients that were kept from the last step, or zeroed since the last backward."""

import math

import pytest
import torch
from bucket_ranks import bucket_ranks

from megabucket.ddp.between_backwards import BetweenBackwards, kept_grads


class TestKeptGradients:
    def after_a_step(self, **values):
        """A rank whose gradients of the last step are still in place."""
        _, (rank,) = bucket_ranks(1)
        rank.bring(**values)
        return rank

    def test_gradients_that_are_still_in_place_are_kept(self):
        assert kept_grads(self.after_a_step(a=1, b=1, c=1, d=1).groups) == ("d", "c", "b", "a")

    @pytest.mark.parametrize("name", "abcd")
    def test_one_is_enough(self, name):
        assert kept_grads(self.after_a_step(**{name: 1}).groups) == (name,)

    def test_without_any_nothing_is_kept(self):
        assert kept_grads(self.after_a_step().groups) == ()

    def test_zeroed_gradients_are_not_kept(self):
        assert kept_grads(self.after_a_step(a=0, b=0, c=0, d=0).groups) == ()

    @pytest.mark.parametrize("value", [-1.0, 1e-44, math.inf, math.nan])
    def test_one_value_in_one_of_them_is_enough_however_small(self, value):
        rank = self.after_a_step(a=0, b=0, c=0, d=0)
        rank.slots["a"].view[3] = value

        assert kept_grads(rank.groups) == ("a",)

    def test_a_place_whose_gradient_was_cleared_keeps_nothing(self):
        rank = self.after_a_step(a=1)
        rank.params["a"].grad = None

        assert torch.all(rank.slots["a"].view == 1)
        assert kept_grads(rank.groups) == ()

    @pytest.mark.parametrize("own", [torch.ones(4), torch.ones(4).to_sparse()], ids=["dense", "sparse"])
    def test_a_gradient_that_has_taken_its_place_is_kept(self, own):
        rank = self.after_a_step(a=1)
        rank.params["a"].grad = own

        assert kept_grads(rank.groups) == ("a",)

    @pytest.mark.parametrize("own", [torch.zeros(4), torch.zeros(4).to_sparse()], ids=["dense", "sparse"])
    def test_zeros_that_have_taken_its_place_are_not(self, own):
        rank = self.after_a_step(a=1, b=1)
        rank.params["a"].grad = own

        assert kept_grads(rank.groups) == ("b",)


class TestZeroedGradients:
    def after_a_backward(self, *, accumulates=True, **values):
        """A rank whose step is open, and what watches it."""
        _, (rank,) = bucket_ranks(1)
        between = BetweenBackwards(rank.groups, keeps=True)
        rank.bring(**values)
        between.note_end(accumulates=accumulates)
        return rank, between

    def interrupted(self, rank, between):
        between.look(is_finished=False)
        return [name for group in rank.groups for name in group.interrupted]

    def zero(self, rank, names):
        for name in names:
            rank.params[name].grad.zero_()

    def test_gradients_that_were_all_zeroed_are_named(self):
        rank, between = self.after_a_backward(a=1, b=2, c=3)

        self.zero(rank, "abc")

        assert self.interrupted(rank, between) == ["c", "b", "a"]

    def test_gradients_that_nobody_has_touched_are_fine(self):
        assert self.interrupted(*self.after_a_backward(a=0, b=0)) == []

    @pytest.mark.parametrize("zeroed", ["a", "b", ""])
    def test_single_ones_may_have_been_zero_before(self, zeroed):
        rank, between = self.after_a_backward(a=1, b=2)

        self.zero(rank, zeroed)
        rank.params["a" if zeroed == "b" else "b"].grad.mul_(0.5)

        assert self.interrupted(rank, between) == []

    def test_nothing_is_looked_at_after_the_backward_that_is_reduced(self):
        rank, between = self.after_a_backward(accumulates=False, a=1)

        self.zero(rank, "a")

        assert self.interrupted(rank, between) == []

    def test_what_no_backward_has_brought_is_not_looked_at(self):
        rank, between = self.after_a_backward()

        rank.slots["a"].view.zero_()

        assert self.interrupted(rank, between) == []

    def test_a_step_that_is_finished_has_kept_gradients_or_none(self):
        rank, between = self.after_a_backward(accumulates=False, a=1)

        between.look(is_finished=True)
        kept = between.kept
        self.zero(rank, "a")
        between.look(is_finished=True)

        assert (kept, between.kept) == (("a",), ())

    def test_reduced_shards_are_not_looked_at(self):
        rank, _ = self.after_a_backward(a=1)
        between = BetweenBackwards(rank.groups, keeps=False)

        between.look(is_finished=True)

        assert between.kept == ()
