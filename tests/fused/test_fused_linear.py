"""Layers that add their weight gradient to main_grad: the same numbers as plain ones, one pass less, and no mixed gradients."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megabucket as mb
from megabucket.errors import MegabucketError, PhaseError
from megabucket.fused import Linear, kernels, linear
from megabucket.testing import LoopbackWorld

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN, SHARDED = mb.DistributedDataParallelConfig(), mb.DistributedDataParallelConfig(use_distributed_optimizer=True)


def model(cls, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(cls(5, 7), torch.nn.ReLU(), cls(7, 7), torch.nn.ReLU(), cls(7, 3, bias=False)).to(dtype)


def small_integers(*shape, dtype=torch.float32):
    """Values whose products and sums are exact in any dtype, in any order."""
    return torch.randint(-2, 3, shape).to(dtype)


def exact_layer(cls, dtype=torch.float32, features=6):
    torch.manual_seed(1)
    layer = cls(features, features).to(dtype)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(small_integers(*param.shape))
    return layer


class Ops(TorchDispatchMode):
    """Names of the operations that reach a kernel."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class TestEqualResults:
    @pytest.mark.parametrize("zeroes", [False, True])
    def test_a_microbatch_that_was_dropped_is_in_no_later_gradient(self, zeroes):
        grads = []
        for cls in (torch.nn.Linear, Linear):
            layer = exact_layer(cls)
            ddp = mb.DistributedDataParallel(layer, PLAIN)
            torch.manual_seed(3)
            if zeroes:
                ddp.zero_grad_buffer()
            with ddp.no_sync():
                ddp(small_integers(4, 6)).sum().backward()
            ddp.zero_grad()
            ddp(small_integers(4, 6)).sum().backward()
            grads.append(layer.weight.grad.clone())
        assert torch.equal(*grads)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("grad_reduce_in_fp32", [True, False], ids=["fp32-buffer", "own-dtype"])
    def test_the_gradient_of_several_microbatches_is_that_of_plain_layers(self, dtype, grad_reduce_in_fp32):
        """Exactly: all values are small integers."""
        config = mb.DistributedDataParallelConfig(grad_reduce_in_fp32=grad_reduce_in_fp32)
        grads = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(exact_layer(cls, dtype), config)
            torch.manual_seed(2)
            of_steps = []
            for _ in range(3):
                with ddp.no_sync():
                    for _ in range(2):
                        (ddp(small_integers(4, 6, dtype=dtype)) * small_integers(4, 6, dtype=dtype)).sum().backward()
                (ddp(small_integers(2, 3, 6, dtype=dtype)) * small_integers(2, 3, 6, dtype=dtype)).sum().backward()
                of_steps += [param.main_grad.clone() for param in ddp.parameters()]
                ddp.zero_grad()
            grads.append(of_steps)

        assert all(grad.abs().sum() > 0 for grad in grads[0])
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))

    @pytest.mark.parametrize("config", [PLAIN, SHARDED], ids=["all-reduce", "reduce-scatter"])
    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
    def test_training_is_that_of_plain_layers(self, config, dtype):
        losses = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(model(cls, dtype), config)
            optimizer = mb.DistributedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01), ddp)
            torch.manual_seed(1)
            of_model = []
            for _ in range(4):
                with ddp.no_sync():
                    ddp(torch.randn(4, 5, dtype=dtype)).square().sum().backward()
                loss = ddp(torch.randn(4, 5, dtype=dtype)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                of_model.append(loss.item())
            losses.append(of_model)

        assert losses[0] == pytest.approx(losses[1], rel=1e-6 if dtype is torch.float32 else 0.02)
        assert losses[0][-1] < losses[0][0]

    def test_under_autocast_the_results_are_those_of_plain_layers(self):
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(exact_layer(cls))
            torch.manual_seed(2)
            inputs = small_integers(4, 6).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                result = ddp(inputs)
            (result * small_integers(4, 6)).sum().backward()
            outcomes.append([result.detach(), inputs.grad, *(param.main_grad for param in ddp.parameters())])

        assert outcomes[0][0].dtype == outcomes[1][0].dtype == torch.bfloat16
        assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))

    def test_ranks_reduce_them_like_any_others(self):
        def play(cls):
            world = LoopbackWorld(2, timeout_s=20)

            def run(rank):
                ddp = mb.DistributedDataParallel(exact_layer(cls), communicator=world.communicator(rank))
                (ddp(torch.full((1, 6), float(rank + 1)))).sum().backward()
                return ddp.module.weight.grad.clone()

            return world.run(run)

        assert torch.equal(torch.stack(play(Linear)), torch.stack(play(torch.nn.Linear)))

    def test_it_has_the_names_and_values_of_a_plain_layer(self):
        plain, fused = model(torch.nn.Linear), model(Linear)

        assert list(plain.state_dict()) == list(fused.state_dict())
        fused.load_state_dict(plain.state_dict())
        inputs = torch.randn(3, 5)
        assert torch.equal(plain(inputs), fused(inputs))


class TestWhereTheGradientGoes:
    def ops_of_backward(self, ddp, inputs):
        loss = ddp(inputs).sum()
        with Ops() as ops:
            loss.backward()
        return ops.seen

    def test_the_first_microbatch_of_a_step_overwrites_and_nothing_is_zeroed_or_copied(self):
        ddp = mb.DistributedDataParallel(exact_layer(Linear), mb.DistributedDataParallelConfig(nonfinite_gradients="allow"))
        ddp.module.bias.requires_grad_(True)
        for _ in range(2):
            ddp(small_integers(2, 6)).sum().backward()
            ddp.zero_grad()
        stale = ddp.module.weight.main_grad.clone()
        with torch.no_grad():
            ddp.module.weight.main_grad.fill_(torch.nan)  # a kernel that read it would spread it

        seen = self.ops_of_backward(ddp, small_integers(2, 6))

        assert not stale.isnan().any()
        assert not ddp.module.weight.grad.isnan().any()
        assert "zero_" not in seen
        assert seen.count("addmm_") == 1
        assert (seen.count("copy_"), seen.count("_foreach_copy_")) == (0, 1)  # the bias

    def test_nothing_is_written_while_a_collective_owns_the_buffer(self):
        """A late gradient comes by autograd, so it is found, and what is in flight stays as it is."""
        world = LoopbackWorld(2, completion="manual", timeout_s=20)

        def run(rank):
            config = mb.DistributedDataParallelConfig(finish="explicit")
            ddp = mb.DistributedDataParallel(exact_layer(Linear), config, communicator=world.communicator(rank))
            ddp(small_integers(2, 6)).sum().backward()
            ddp.start_grad_sync()
            ddp(torch.ones(2, 6)).sum().backward()
            with pytest.raises(MegabucketError) as caught:
                ddp.finish_grad_sync()  # the loopback world compares the bits
            return type(caught.value).__name__

        assert world.run(run) == ["LateGradientError"] * 2

    def test_plain_torch_may_clear_the_gradients(self):
        """The wrapper hears of it in the first hook, so one layer goes the plain way, and the sums are right."""
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(model(cls))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
            torch.manual_seed(3)
            for _ in range(3):
                ddp(torch.randn(4, 5)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            outcomes.append([param.detach().clone() for param in ddp.parameters()])

        assert all(torch.allclose(one, other) for one, other in zip(*outcomes, strict=True))

    @pytest.mark.parametrize("set_to_none", [False, None], ids=["zeroed in place", "kept"])
    def test_gradients_that_stay_are_added_to(self, set_to_none):
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(exact_layer(cls))
            torch.manual_seed(3)
            for _ in range(3):
                ddp(small_integers(4, 6)).sum().backward()
                if set_to_none is not None:
                    torch.nn.Module.zero_grad(ddp.module, set_to_none=set_to_none)
            outcomes.append(ddp.module.weight.main_grad.clone())

        assert torch.equal(*outcomes)

    def test_a_layer_that_is_used_twice_adds_both(self):
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(exact_layer(cls))
            torch.manual_seed(3)
            for _ in range(2):
                (ddp.module(small_integers(4, 6)) * 2 + ddp.module(small_integers(4, 6))).sum().backward()
                outcomes.append(ddp.module.weight.grad.clone())
                ddp.zero_grad()

        assert torch.equal(outcomes[0], outcomes[2])
        assert torch.equal(outcomes[1], outcomes[3])

    def test_one_that_is_used_twice_in_a_step_that_another_gradient_begins_is_a_plain_layer(self):
        """After zero_grad() of a plain optimizer: the first use is on reduced gradients, the second one need not be."""
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            layer, between = exact_layer(cls), exact_layer(torch.nn.Linear)
            ddp = mb.DistributedDataParallel(torch.nn.Sequential(layer, between, layer))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
            torch.manual_seed(3)
            for _ in range(3):
                ddp(small_integers(4, 6)).sum().backward()
                outcomes.append(layer.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()

        assert all(torch.equal(plain, fused) for plain, fused in zip(outcomes[:3], outcomes[3:], strict=True))

    def test_activation_checkpointing_runs_backward_again_inside(self):
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(exact_layer(cls))
            torch.manual_seed(3)
            inputs = small_integers(4, 6).requires_grad_()
            result = torch.utils.checkpoint.checkpoint(ddp.module, inputs, use_reentrant=False)
            (result * small_integers(4, 6)).sum().backward()
            outcomes.append(ddp.module.weight.grad.clone())

        assert torch.equal(*outcomes)


class TestWhatMustNotBeMixed:
    def test_a_weight_that_the_loss_reads_as_well_is_refused(self):
        ddp = mb.DistributedDataParallel(exact_layer(Linear))

        loss = ddp(small_integers(2, 6)).sum() + ddp.module.weight.square().sum()
        with pytest.raises(PhaseError, match=r"'weight' received a gradient through autograd .* zero_out_wgrad = True"):
            loss.backward()

    def test_with_zero_out_wgrad_both_count(self):
        outcomes = []
        for cls in (torch.nn.Linear, Linear):
            ddp = mb.DistributedDataParallel(exact_layer(cls))
            ddp.module.weight.zero_out_wgrad = True
            torch.manual_seed(3)
            for _ in range(2):
                (ddp.module.weight.square().sum() + ddp(small_integers(2, 6)).sum()).backward()
                outcomes.append(ddp.module.weight.grad.clone())
                ddp.zero_grad()

        assert torch.equal(outcomes[0], outcomes[2])
        assert torch.equal(outcomes[1], outcomes[3])

    def test_autograd_grad_gets_real_gradients_and_leaves_the_buffer_alone(self):
        ddp = mb.DistributedDataParallel(exact_layer(Linear))
        inputs = small_integers(2, 6).requires_grad_()
        before = ddp.module.weight.main_grad.clone()

        grads = torch.autograd.grad(ddp(inputs).sum(), [ddp.module.weight, inputs])
        (of_inputs,) = torch.autograd.grad(ddp(inputs).sum(), [inputs])

        assert torch.equal(grads[0], torch.ones(6, 2) @ inputs)
        assert torch.equal(grads[1], of_inputs)
        assert torch.equal(ddp.module.weight.main_grad, before)
        assert ddp.module.weight.grad_added_to_main_grad is False

    def test_an_old_kernel_beside_it_still_finds_its_zeros(self):
        """A kernel that adds without asking has been there; ours adds to its zeros."""
        ddp = mb.DistributedDataParallel(exact_layer(Linear))
        weight = ddp.module.weight
        weight.main_grad.add_(1.0)
        weight.grad_added_to_main_grad = True
        (weight.sum() + ddp.module.bias.sum()).backward()  # brings the dummy and calls the hook
        ddp.zero_grad()

        assert not weight.main_grad.any()
        ddp(torch.ones(2, 6)).sum().backward()
        assert torch.equal(weight.grad, torch.full((6, 6), 2.0))


class TestOutsideAWrapper:
    def test_it_is_a_plain_layer(self):
        plain, fused = exact_layer(torch.nn.Linear), exact_layer(Linear)
        torch.manual_seed(2)
        inputs = small_integers(2, 6)

        for layer in (plain, fused):
            layer(inputs).sum().backward()

        assert torch.equal(plain.weight.grad, fused.weight.grad)

    def test_after_detach_it_is_a_plain_layer_again(self):
        ddp = mb.DistributedDataParallel(exact_layer(Linear))
        ddp(small_integers(2, 6)).sum().backward()

        layer = ddp.detach()
        layer(torch.ones(2, 6)).sum().backward()

        assert torch.equal(layer.weight.grad, torch.full((6, 6), 2.0))
        assert "main_grad_slot" not in layer.weight.__dict__

    @pytest.mark.parametrize("frozen", [True, False])
    def test_without_a_gradient_nothing_is_kept_for_backward(self, frozen):
        ddp = mb.DistributedDataParallel(torch.nn.Sequential(exact_layer(Linear), exact_layer(Linear)))
        layer = ddp.module[0]
        inputs = small_integers(2, 6)
        if frozen:
            result = linear(inputs, layer.weight.detach(), None)
        else:
            with torch.no_grad():
                result = linear(inputs, layer.weight, layer.bias)

        assert result.grad_fn is None

    def test_the_slot_keeps_no_wrapper_alive(self):
        ddp = mb.DistributedDataParallel(exact_layer(Linear))
        slot = weakref.ref(ddp.module.weight.main_grad_slot())
        module = ddp.module
        ddp.detach()
        del ddp
        gc.collect()

        assert slot() is None
        assert module.weight.requires_grad


class TestKernels:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("keep", [0.0, 1.0])
    def test_on_a_cpu_the_sum_is_in_the_dtype_of_the_buffer(self, dtype, keep):
        """1 + 4096 * 2**-12 in 16 bits would lose every addend; widened, nothing is lost."""
        main_grad = torch.ones(1, 1)
        inputs, grads = torch.full((4_096, 1), 2.0**-6, dtype=dtype), torch.full((4_096, 1), 2.0**-6, dtype=dtype)

        kernels.add_weight_grad(main_grad, inputs, grads, keep=keep)

        assert main_grad.item() == 1.0 + keep

    def test_the_extension_is_looked_for_by_its_own_name(self, monkeypatch):
        asked = []

        def find(name):
            asked.append(name)
            raise ImportError(name)

        monkeypatch.setattr(kernels.importlib, "import_module", find)

        assert kernels._apex_extension.__wrapped__() is None
        assert asked == ["fused_weight_gradient_mlp_cuda"]
