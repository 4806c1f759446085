"""Mistakes put into the exchange with owners and into their updates on purpose: each is found by a test of this folder."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import test_owner_steps as killers

from megabucket.optim import distributed_optimizer, owner_exchange
from megabucket.optim.distributed_optimizer import DistributedOptimizer
from megabucket.optim.owner_exchange import OwnerExchange
from megabucket.optim.sharding import Sharding
from megabucket.optim.shards import WholeShard
from megabucket.optim.updates import Update

DIFFERS = "on rank [0-3]: Tensor-likes are not (close|equal)"


def pieces_in_buffer_order(patch):
    original = owner_exchange.plan_exchange

    def plan_exchange(*args, **kwargs):
        plan = original(*args, **kwargs)
        return plan and replace(plan, held=tuple(sorted(plan.held, key=lambda piece: piece.in_buffer)))

    patch.setattr(owner_exchange, "plan_exchange", plan_exchange)


def own_part_dropped(patch):
    original = OwnerExchange._launch

    def launch(self, group, what, buckets, calls):
        rank = group.communicator.rank
        for call in calls:
            call.sent.split(call.sent_numels)[rank].zero_()
        original(self, group, what, buckets, calls)

    patch.setattr(OwnerExchange, "_launch", launch)


def values_not_returned(patch):
    patch.setattr(OwnerExchange, "return_values", lambda _: None)


def values_returned_before_they_are_stored(patch):
    store, give_back = Sharding.store_values, OwnerExchange.return_values
    waiting = {}

    def return_values(self):
        give_back(self)
        store(waiting.pop(id(self)))

    patch.setattr(Sharding, "store_values", lambda self: waiting.update({id(self.exchange): self}))
    patch.setattr(OwnerExchange, "return_values", return_values)


def owners_do_not_round(patch):
    original = Sharding._place

    def place(self, cut):
        original(self, cut)
        flat = [shard for shard in cut.shards if shard.has_own_values and not isinstance(shard, WholeShard)]
        self._rounded = [shard.model_values for shard in flat], [shard.main for shard in flat]

    patch.setattr(Sharding, "_place", place)


def numbers_of_both_ways_swapped(patch):
    original = owner_exchange._call
    patch.setattr(owner_exchange, "_call", lambda pieces, sent, received, **how: original(pieces, received, sent, **how))


def owners_do_not_clip(patch):
    original = distributed_optimizer.clip_by_norm

    def clip_by_norm(grads, **how):
        original([grad for grad in grads if grad.dim() == 1], **how)

    patch.setattr(distributed_optimizer, "clip_by_norm", clip_by_norm)


def owned_gradients_count_twice(patch):
    original = Sharding._place

    def place(self, cut):
        original(self, cut)
        self.counted_grads[0].extend(shard.buffer_grads for shard in self._held)

    patch.setattr(Sharding, "_place", place)


def unscaled_at_owners_again(patch):
    original = OwnerExchange.finish_grads

    def finish_grads(self, **how):
        original(self, **how)
        for shard in self._owned:
            shard.grad = shard.grad / killers.SCALE

    patch.setattr(OwnerExchange, "finish_grads", finish_grads)


def changed_gradients_dropped_before_the_norm(patch):
    original = OwnerExchange.launch_grads

    def launch_grads(self, **how):
        original(self, **how)
        for shard in self._held:
            shard.grad = shard.buffer_grads

    patch.setattr(OwnerExchange, "launch_grads", launch_grads)


def changed_gradients_left_behind(patch):
    original = OwnerExchange.launch_grads
    patch.setattr(OwnerExchange, "launch_grads", lambda self, **_: original(self, are_widened=False))


def gradients_of_the_first_step_kept(patch):
    original, kept = WholeShard.receive, {}

    def receive(self, grads):
        original(self, kept.setdefault(id(self), grads.clone()) if grads.numel() else grads)

    patch.setattr(WholeShard, "receive", receive)


def gradients_not_awaited(patch):
    original = OwnerExchange._launch

    class Ready:
        def wait(self):
            """Do not wait."""

    def launch(self, group, what, buckets, calls):
        original(self, group, what, buckets, calls)
        self._on_way[-1] = (Ready(), *self._on_way[-1][1:])

    patch.setattr(OwnerExchange, "_launch", launch)


def skipped_parameters_stepped(patch):
    original = Update.step

    def step(self, state, *, skipped):
        original(self, state, skipped=() if self.is_whole else skipped)

    patch.setattr(Update, "step", step)


def sent_before_the_verdict(patch):
    original, launch = DistributedOptimizer.prepare_step, OwnerExchange.launch_grads

    def prepare_step(self, also=()):
        original(self, also)
        launch(self.sharding.exchange, are_widened=False)

    patch.setattr(DistributedOptimizer, "prepare_step", prepare_step)
    patch.setattr(OwnerExchange, "launch_grads", lambda *_, **__: None)


def communicator_of_another_group(patch):
    original = OwnerExchange._launch

    def launch(self, group, what, buckets, calls):
        original(self, self._groups[0][0], what, buckets, calls)

    patch.setattr(OwnerExchange, "_launch", launch)


def failing_owner_goes_on(patch):
    def call(self, method):
        try:
            original(self, method)
        except killers.UpdateFailedError:
            return

    original = Update.call
    patch.setattr(Update, "call", call)


@dataclass(frozen=True)
class Mutant:
    """A mistake, the test that finds it, and what the test then says."""

    apply: Callable[[pytest.MonkeyPatch], None]
    killer: Callable[[], None]
    says: str = DIFFERS


MUTANTS = (
    Mutant(pieces_in_buffer_order, killers.test_owners_update_as_one_process_does),
    Mutant(own_part_dropped, killers.test_owners_update_as_one_process_does),
    Mutant(values_not_returned, killers.test_owners_update_as_one_process_does),
    Mutant(numbers_of_both_ways_swapped, killers.test_owners_update_as_one_process_does, "the sent parts of an all-to-all"),
    Mutant(gradients_of_the_first_step_kept, killers.test_owners_update_as_one_process_does),
    Mutant(gradients_not_awaited, killers.test_nothing_that_owners_exchange_is_used_before_it_is_waited_for),
    Mutant(owners_do_not_clip, killers.test_gradients_are_clipped_at_owners_by_the_norm_of_all),
    Mutant(owned_gradients_count_twice, killers.test_gradients_are_clipped_at_owners_by_the_norm_of_all),
    Mutant(
        values_returned_before_they_are_stored,
        killers.test_owners_of_16_bit_parameters_step_on_float32_and_return_rounded_values,
    ),
    Mutant(owners_do_not_round, killers.test_owners_of_16_bit_parameters_step_on_float32_and_return_rounded_values),
    Mutant(unscaled_at_owners_again, killers.test_gradients_that_were_unscaled_reach_owners_once),
    Mutant(
        changed_gradients_dropped_before_the_norm,
        killers.test_the_norm_is_that_of_unscaled_gradients,
        r"assert 422\.219\d* == 53\.197",
    ),
    Mutant(changed_gradients_left_behind, killers.test_gradients_that_were_unscaled_reach_owners_once),
    Mutant(skipped_parameters_stepped, killers.test_owners_leave_a_matrix_alone_that_no_rank_has_used),
    Mutant(
        communicator_of_another_group, killers.test_experts_have_owners_in_their_own_group, "an all-to-all of 2 ranks has 4"
    ),
    Mutant(
        sent_before_the_verdict, killers.test_gradients_leave_for_owners_only_after_the_verdict_of_all_ranks, "assert 5 > 9"
    ),
    Mutant(
        failing_owner_goes_on,
        killers.test_a_failing_update_is_named_on_all_ranks_and_nothing_of_it_is_gathered,
        "DID NOT RAISE .*UpdateFailedError",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_a_mistake_with_owners_is_found(mutant, monkeypatch):
    mutant.apply(monkeypatch)

    with pytest.raises((Exception, pytest.fail.Exception), match=mutant.says):
        mutant.killer()
