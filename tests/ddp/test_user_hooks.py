"""Post-accumulate hooks of the user: they see the gradient, and what they leave in ``.grad`` counts, as in plain torch."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from loop_ranks import Ranks, Weights, grads, main_grads, optimizer_of
from torch.utils.checkpoint import checkpoint

from megabucket.ddp import DistributedDataParallel
from megabucket.errors import MegabucketError, PhaseError, UnreducedGradientsError, UnusedParameterError
from megabucket.fused import Linear

SHARDED = {"use_distributed_optimizer": True}
MODES = [pytest.param({}, id="all-reduce"), pytest.param(SHARDED, id="reduce-scatter")]
SIZE, STEPS, MICROBATCHES = 2, 3, 3


class Both(torch.nn.Module):
    """A small and a large parameter with hooks, and two without. Gradients are integers, so that all sums are exact.

    The gradient of ``small`` comes last, so that it completes the last bucket.
    """

    def __init__(self):
        super().__init__()
        for name, shape in (("small", (4, 4)), ("large", (400, 400)), ("other", (3,)), ("another", (5,))):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, factor):
        return sum((param * factor).sum() for param in self.parameters())


def multiply(param):
    param.grad.mul_(3)


def replace(param):
    param.grad = param.grad * 3


def clear(param):
    param.grad = None


def read(param):
    assert param.grad.isfinite().all()


def factor_of(rank, step, microbatch):
    return float((rank + 1) * (step + 2) + microbatch)


class Hooked:
    """Registers ``hook`` on some parameters of one module, and notes the gradient that it sees each time."""

    def __init__(self, module, hook, names=("small", "large")):
        self.module, self.hook, self.names, self.seen, self.handles = module, hook, names, [], []

    def register(self):
        for name in self.names:

            def call(param, name=name):
                self.seen.append((name, str(None if param.grad is None else param.grad.sum().item())))
                self.hook(param)

            self.handles.append(getattr(self.module, name).register_post_accumulate_grad_hook(call))

    def remove(self):
        while self.handles:
            self.handles.pop().remove()


def plain(model, hook, on_event):
    """Train one plain copy per rank on the mean of their gradients. Return the weights and what the hooks saw on each rank."""
    modules = [copy.deepcopy(model) for _ in range(SIZE)]
    hooked = [Hooked(module, hook) for module in modules]
    for one in hooked:
        on_event(one, "before wrapping")
        on_event(one, "after wrapping")
    for step in range(STEPS):
        for rank, module in enumerate(modules):
            for microbatch in range(MICROBATCHES):
                on_event(hooked[rank], (step, microbatch))
                module(factor_of(rank, step, microbatch)).backward()
        for params in zip(*(module.parameters() for module in modules), strict=True):
            mean = sum(0 if param.grad is None else param.grad for param in params) / SIZE
            with torch.no_grad():
                for param in params:
                    param.sub_(mean)
                    param.grad = None
    return dict(modules[0].named_parameters()), [one.seen for one in hooked]


def wrapped(model, hook, on_event, **switches):
    """The same with the wrapper."""
    hooked = {}

    def prepare(rank, module):
        hooked[rank] = Hooked(module, hook)
        on_event(hooked[rank], "before wrapping")

    ranks = Ranks(SIZE, model, prepare=prepare, unused_parameters="zero", **switches)

    def train(rank, ddp):
        optimizer = optimizer_of(ddp)
        on_event(hooked[rank], "after wrapping")
        for step in range(STEPS):
            for microbatch in range(MICROBATCHES):
                on_event(hooked[rank], (step, microbatch))
                if microbatch < MICROBATCHES - 1:
                    with ddp.no_sync():
                        ddp(factor_of(rank, step, microbatch)).backward()
                else:
                    ddp(factor_of(rank, step, microbatch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.finish_param_sync()

    ranks.run(train)
    return dict(ranks.modules[0].named_parameters()), [hooked[rank].seen for rank in range(SIZE)]


def at(*events, removed_at=()):
    """Register at each of ``events``, and remove at those of ``removed_at``."""

    def on_event(hooked, event):
        if event in events:
            hooked.register()
        if event in removed_at:
            hooked.remove()

    return on_event


WHEN = {
    "before": at("before wrapping"),
    "after": at("after wrapping"),
    "both": at("before wrapping", "after wrapping"),
    "between-microbatches": at((1, 1)),
    "removed": at("before wrapping", "after wrapping", removed_at=[(2, 1)]),
    "again": at("before wrapping", (2, 0), removed_at=[(1, 0)]),
}


class TestAsInPlainTorch:
    @pytest.mark.parametrize("when", WHEN)
    @pytest.mark.parametrize("hook", [multiply, replace, clear, read])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "plan",
        [
            pytest.param({"bucket_size": 1}, id="bucket-each"),
            pytest.param({"bucket_size": None}, id="one-bucket"),
            pytest.param({"overlap_grad_reduce": False}, id="no-overlap"),
        ],
    )
    def test_the_hook_sees_the_gradient_and_what_it_leaves_counts(self, when, hook, mode, plan):
        expected, expected_seen = plain(Both(), hook, WHEN[when])

        params, seen = wrapped(Both(), hook, WHEN[when], **plan, **mode)

        for name, param in expected.items():
            assert torch.equal(params[name], param), name
        assert [sorted(one) for one in seen] == [sorted(one) for one in expected_seen]


def one_rank(model, **switches):
    """Wrap a model on one rank, and run a first step, which learns the number of gradients."""
    (ddp,) = Ranks(1, model, **switches).ddps
    return ddp


def learned(ddp, *args, **factors):
    ddp(*args, **factors).sum().backward()
    ddp.finish_grad_sync()
    ddp.zero_grad()


def double(param):
    param.grad.mul_(2)


class TestSeveralGradients:
    @pytest.mark.parametrize("switches", [{"finish": "explicit"}, SHARDED], ids=["explicit", "reduce-scatter"])
    def test_a_second_backward_of_the_last_microbatch_shows_the_hook_the_sum(self, switches):
        """The caller must not use the gradient between the two."""
        ddp, seen = one_rank(Weights("ab"), **switches), []
        ddp.module.a.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad[0].item()))
        ddp.module.a.register_post_accumulate_grad_hook(double)

        for _ in range(2):
            ddp(a=1.0, b=1.0).backward()
            with pytest.raises(PhaseError):
                ddp.module.a.grad.mul_(2)
            ddp(a=3.0, b=1.0).backward()
            ddp.finish_grad_sync()
            assert main_grads(ddp.module) == {"a": 10.0, "b": 2.0}  # (1 * 2 + 3) * 2
            ddp.zero_grad()

        assert seen == [1.0, 5.0] * 2

    @pytest.mark.parametrize("mode", MODES)
    def test_each_gradient_of_a_layer_that_is_rerun_in_backward(self, mode):
        """Reentrant checkpointing: one backward brings ``a`` two gradients."""

        class Rerun(Weights):
            def forward(self, *factors):
                y = self.b * 1.0
                for factor in factors:
                    y = checkpoint(lambda y, factor=factor: y + self.a * factor, y, use_reentrant=True)
                return y.sum()

        def run(module, backward):
            seen = []
            module.a.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad[0].item()))
            module.a.register_post_accumulate_grad_hook(double)
            backward()
            return seen, module

        plain_module = Rerun("ab")
        expected_seen, _ = run(plain_module, lambda: plain_module(2.0, 3.0).backward())
        ddp = one_rank(Rerun("ab"), **mode)
        for _ in range(2):
            learned(ddp, 1.0, 1.0)

        seen, module = run(ddp.module, lambda: ddp(2.0, 3.0).backward())

        assert seen == expected_seen
        assert main_grads(module) == grads(plain_module)

    def test_a_tied_weight_has_one_gradient(self):
        def model():
            torch.manual_seed(0)
            layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            layers[1].weight = layers[0].weight
            return layers

        x, tied = torch.ones(2, 4), model()
        ddp = one_rank(model())
        learned(ddp, x)

        for module, call in ((tied, tied), (ddp.module, ddp)):
            module[0].weight.register_post_accumulate_grad_hook(double)
            call(x).sum().backward()

        for param, expected in zip(ddp.module.parameters(), tied.parameters(), strict=True):
            assert torch.equal(param.grad, expected.grad)


class TestWhatAHookLeaves:
    @pytest.mark.parametrize("size", [4, 400])
    def test_a_hook_that_is_registered_inside_a_backward_counts_in_it(self, size):
        ddp = one_rank(torch.nn.Linear(size, size, bias=False))
        x, weight = torch.ones(1, size), ddp.module.weight
        learned(ddp, x)

        out = ddp(x)
        out.register_hook(lambda _: weight.register_post_accumulate_grad_hook(double) and None)
        out.sum().backward()

        assert weight.grad.eq(2.0).all()

    @pytest.mark.parametrize(
        ("grad_reduce_in_fp32", "dtypes"),
        [(True, [torch.bfloat16, torch.float32]), (False, [torch.bfloat16, torch.bfloat16])],
    )
    def test_its_dtype_is_that_of_the_parameter_first_and_then_that_of_the_sum(self, grad_reduce_in_fp32, dtypes):
        ddp, seen = one_rank(Weights("ab", dtype=torch.bfloat16), grad_reduce_in_fp32=grad_reduce_in_fp32), []
        ddp.module.a.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.dtype))
        ddp.module.a.register_post_accumulate_grad_hook(replace)

        with ddp.no_sync():
            ddp(a=1.0, b=1.0).backward()
        ddp(a=2.0, b=1.0).backward()

        assert seen == dtypes
        assert main_grads(ddp.module) == {"a": 15.0, "b": 2.0}  # (1 * 3 + 2) * 3

    def test_what_it_leaves_is_added_to_float32_sums_of_16_bit_buckets(self):
        """256 + 1 in bfloat16 is 256."""
        switches = {"grad_reduce_in_fp32": False, "param_name_patterns_for_fp32_local_accumulation": ("a",)}
        ddp = one_rank(Weights("ab", dtype=torch.bfloat16), **switches)
        ddp.module.a.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad + 1))

        with ddp.no_sync():
            ddp(a=255.0, b=256.0).backward()
            ddp(a=1.0, b=1.0).backward()
        ddp(a=1.0, b=1.0).backward()

        assert main_grads(ddp.module) == {"a": 260.0, "b": 256.0}

    def test_a_gradient_that_it_sets_to_none_is_a_missing_one(self):
        ddp = one_rank(Weights("ab"))
        handle = ddp.module.a.register_post_accumulate_grad_hook(clear)

        with pytest.raises(UnusedParameterError, match=r"'a' got no gradient .* their \.grad was set to None \(by a hook"):
            ddp(a=1.0, b=1.0).backward()
        handle.remove()
        ddp(a=1.0, b=1.0).backward()

        assert main_grads(ddp.module) == {"a": 1.0, "b": 1.0}

    @pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
    def test_it_counts_when_the_graph_of_gradients_is_kept(self):
        ddp = one_rank(Weights("ab"))
        ddp.module.a.register_post_accumulate_grad_hook(replace)

        ddp(a=2.0, b=1.0).backward(create_graph=True)

        assert main_grads(ddp.module) == {"a": 6.0, "b": 1.0}

    def test_a_hook_that_returns_a_tensor_is_the_error_of_torch(self):
        """Autograd passes it on to the next hook, which is ours."""

        def backward(module, call):
            handle = module.a.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
            with pytest.raises(RuntimeError) as caught:
                call(a=1.0, b=1.0).backward()
            handle.remove()
            return str(caught.value)

        plain_module, ddp = Weights("ab"), one_rank(Weights("ab"))
        learned(ddp, a=1.0, b=1.0)

        assert backward(ddp.module, ddp) == backward(plain_module, plain_module)
        ddp.zero_grad()
        ddp(a=1.0, b=1.0).backward()
        assert main_grads(ddp.module) == {"a": 1.0, "b": 1.0}

    def test_the_weight_of_a_fused_layer_has_a_real_gradient_for_it(self):
        """Its kernel adds to ``main_grad`` and gives autograd a dummy, as long as nobody looks."""
        ddp, seen = one_rank(Linear(3, 3, bias=False)), []
        weight = ddp.module.weight
        x = torch.ones(1, 3)
        learned(ddp, x)

        with ddp.no_sync():
            ddp(x).sum().backward()
        handle = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad[0, 0].item()))
        second = weight.register_post_accumulate_grad_hook(double)
        with ddp.no_sync():
            ddp(x).sum().backward()
        handle.remove()
        second.remove()
        ddp(x).sum().backward()

        assert seen == [2.0]
        assert weight.grad.eq(5.0).all()  # (1 + 1) * 2 + 1

    def test_a_hook_of_the_tensor_changes_the_gradient_of_a_fused_layer(self):
        ddp, seen = one_rank(Linear(3, 3, bias=False)), []
        weight, x = ddp.module.weight, torch.ones(1, 3)
        learned(ddp, x)

        handle = weight.register_hook(lambda grad: grad * 2)
        torch.autograd.graph.register_multi_grad_hook([weight], lambda found: seen.append(found[0][0, 0].item()))
        with ddp.no_sync():
            ddp(x).sum().backward()
        handle.remove()
        ddp(x).sum().backward()

        assert seen == [2.0, 1.0]
        assert weight.grad.eq(3.0).all()


class TestOrderAndRemoval:
    def hooked(self, order, **switches):
        """Wrap vectors, the first of which has one hook from before, which notes its name, and one that was removed."""
        handles = []

        def prepare(_, module):
            handles.append(module.a.register_post_accumulate_grad_hook(lambda _: order.append("before")))
            module.b.register_post_accumulate_grad_hook(double).remove()

        (ddp,) = Ranks(1, Weights("abc"), prepare=prepare, **switches).ddps
        return ddp, handles[0]

    def test_hooks_run_in_the_order_of_their_registration(self):
        order = []
        ddp, _ = self.hooked(order)
        for name in ("first", "second"):
            ddp.module.a.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))

        ddp(a=1.0, b=1.0, c=1.0).backward()

        assert order == ["before", "first", "second"]

    def test_a_handle_from_before_wrapping_removes_its_hook_and_gradients_are_staged_again(self):
        order = []
        ddp, handle = self.hooked(order)
        learned(ddp, a=1.0, b=1.0, c=1.0)
        staging = ddp.bucket_groups[0].staging
        found = []

        handle.remove()
        for _ in range(3):
            terms = {name: getattr(ddp.module, name) * 1.0 for name in "abc"}
            terms["a"].register_hook(lambda _: found.append(len(staging)))  # before its gradient comes, as the last one
            sum(terms[name].sum() for name in "abc").backward()
            ddp.zero_grad()

        assert order == ["before"]
        assert found[-1] == 2

    def test_hooks_outlive_the_wrapper_and_are_honoured_by_the_next_one(self):
        order = []
        ddp, handle = self.hooked(order)
        module = ddp.module
        after = module.a.register_post_accumulate_grad_hook(lambda _: order.append("after"))
        ddp.detach()

        module(a=1.0, b=1.0, c=1.0).backward()
        module.zero_grad()
        assert order == ["before", "after"]

        ddp = DistributedDataParallel(module)
        module.a.register_post_accumulate_grad_hook(double)
        ddp(a=1.0, b=1.0, c=1.0).backward()
        assert order == ["before", "after"] * 2
        assert main_grads(module) == {"a": 2.0, "b": 1.0, "c": 1.0}

        handle.remove()
        after.remove()
        ddp.zero_grad()
        ddp(a=1.0, b=1.0, c=1.0).backward()
        assert order == ["before", "after"] * 2

    def test_a_copy_of_the_module_has_hooks_as_torch_copies_them(self):
        seen = []
        ddp, _ = self.hooked([])
        ddp.module.a.register_post_accumulate_grad_hook(seen.append)

        copied = copy.deepcopy(ddp.module)
        copied(a=1.0, b=1.0, c=1.0).backward()

        assert seen == []  # torch copies no post-accumulate hooks
        assert grads(copied) == {"a": 1.0, "b": 1.0, "c": 1.0}
        assert grads(ddp.module) == {"a": None, "b": None, "c": None}

    def test_a_handle_is_copied_and_pickled_as_without_the_wrapper(self):
        """Modules that hold one as an attribute are."""
        ddp, early = self.hooked([])
        late = ddp.module.b.register_post_accumulate_grad_hook(double)
        ddp.module.handle = late

        copied = copy.deepcopy(ddp.module)
        unpickled = pickle.loads(pickle.dumps(late))  # noqa: S301
        for handle in (copied.handle, unpickled, copy.deepcopy(early)):
            handle.remove()
        ddp(a=1.0, b=1.0, c=1.0).backward()

        assert unpickled.id == late.id
        assert main_grads(ddp.module)["b"] == 2.0  # a handle of a copy removes nothing

    def test_wrapper_and_module_are_collected_although_there_are_hooks(self):
        ddp, handle = self.hooked([])
        ddp.module.a.register_post_accumulate_grad_hook(double)
        ddp(a=1.0, b=1.0, c=1.0).backward()
        references = [weakref.ref(ddp), weakref.ref(ddp.module), weakref.ref(ddp.module.a)]

        ddp.detach()
        del ddp
        gc.collect()

        assert [reference() for reference in references] == [None] * 3
        handle.remove()


class TestFailures:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_hook_that_raises_on_one_rank_ends_the_step_on_all(self, mode):
        def boom(_):
            raise KeyError("boom")

        ranks = Ranks(2, Weights("abc"), bucket_size=1, **mode)

        def train(rank, ddp):
            learned(ddp, a=1.0, b=1.0, c=1.0)
            handle = ddp.module.b.register_post_accumulate_grad_hook(boom if rank == 1 else double)

            def step():
                with ddp.step():
                    ddp(a=1.0, b=1.0, c=1.0).backward()
                    ddp.finish_grad_sync()

            with pytest.raises(MegabucketError) as caught:
                step()
            ddp.zero_grad()
            handle.remove()
            ddp(a=1.0, b=1.0, c=1.0).backward()
            ddp.finish_grad_sync()
            return str(caught.value)

        first, second = ranks.run(train)

        assert first == second
        assert "rank 1" in first
        assert "boom" in first
        for param in ranks.modules[0].parameters():
            assert mode or param.grad.eq(1.0).all()

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("in_no_sync", [True, False])
    def test_an_optimizer_in_backward_is_refused_whenever_its_hook_was_registered(self, when, in_no_sync):
        """One optimizer per parameter, which steps as soon as the gradient has come: it would not be reduced."""

        def register(module):
            for param in module.parameters():
                optimizer = torch.optim.SGD([param], lr=1.0)
                param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

        (ddp,) = Ranks(1, Weights("ab"), prepare=lambda _, module: when == "before" and register(module)).ddps
        if when == "after":
            register(ddp.module)

        with ddp.no_sync() if in_no_sync else nullcontext():
            loss = ddp(a=1.0, b=1.0)
            with pytest.raises(UnreducedGradientsError, match=r"by a hook .* must not step"):
                loss.backward()

        assert ddp.module.a.eq(1.0).all()
        assert ddp.module.b.eq(1.0).all()


class TestSomeRanksAndWrappers:
    @pytest.mark.parametrize("mode", MODES)
    def test_a_hook_on_one_rank_changes_no_order_of_launches(self, mode):
        ranks = Ranks(2, Both(), bucket_size=1, **mode)
        num_hooked = []

        def train(rank, ddp):
            for step in range(3):
                if rank == 1 and step == 1:
                    ddp.module.small.register_post_accumulate_grad_hook(num_hooked.append)
                    ddp.module.large.register_post_accumulate_grad_hook(num_hooked.append)
                ddp(1.0).backward()
                ddp.finish_grad_sync()
                ddp.zero_grad()

        ranks.run(train)

        assert ranks.schedule(0) == ranks.schedule(1)
        assert len(num_hooked) == 4

    def test_two_wrappers_whose_parameters_share_a_backward(self):
        first, second = one_rank(Weights("ab")), one_rank(Weights("cd"))
        for ddp, name in ((first, "a"), (second, "d")):
            getattr(ddp.module, name).register_post_accumulate_grad_hook(replace)

        (first(a=1.0, b=1.0) + second(c=1.0, d=2.0)).backward()

        assert main_grads(first.module) == {"a": 3.0, "b": 1.0}
        assert main_grads(second.module) == {"c": 1.0, "d": 6.0}


class TestOtherHooksOfTorch:
    def test_hooks_of_the_tensor_that_were_registered_after_wrapping_change_what_is_accumulated(self):
        ddp, seen = one_rank(Weights("ab")), []
        learned(ddp, a=1.0, b=1.0)
        ddp.module.a.register_hook(lambda grad: grad * 3)
        torch.autograd.graph.register_multi_grad_hook(
            list(ddp.parameters()), lambda found: seen.append([grad[0].item() for grad in found])
        )

        with ddp.no_sync():
            ddp(a=1.0, b=1.0).backward()
        ddp(a=2.0, b=1.0).backward()

        assert main_grads(ddp.module) == {"a": 9.0, "b": 2.0}
        assert seen == [[3.0, 1.0], [6.0, 1.0]]

    def test_global_hooks_of_all_modules_find_the_gradients_that_have_come(self):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        ddp, found = one_rank(model, overlap_grad_reduce=False), []
        x = torch.ones(2, 4, requires_grad=True)

        def note(module, *_):
            if module is ddp.module[0]:
                found.append([param.grad is not None for param in ddp.module[1].parameters()])

        handle = torch.nn.modules.module.register_module_full_backward_hook(note)
        try:
            with ddp.no_sync():
                ddp(x).sum().backward()
        finally:
            handle.remove()

        assert found == [[True, True]]
