"""The one-pass rule: what the hook does for every state that ``param.grad`` can be in.

The number of passes over memory is read off the version counter of the buffer, which every write in place raises by one.
"""

import pytest
import torch

from megabucket.buffer import ParamAndGradBuffer, dtype_name
from megabucket.config import DistributedDataParallelConfig
from megabucket.errors import PhaseError
from megabucket.layout import ParamSpec, build_layout


def hooked(param, **switches):
    """A parameter in a buffer of its own, with the hook that the wrapper would install; returns its slot and the buffer."""
    specs = [ParamSpec("w", tuple(param.shape), dtype_name(param.dtype))]
    (layout,) = build_layout(specs, DistributedDataParallelConfig(**switches), dp_size=1).buffers
    buffer = ParamAndGradBuffer(layout, {"w": param})
    slot = buffer.slots["w"]
    param.register_post_accumulate_grad_hook(lambda _: slot.store())
    return slot, buffer


def one_step_ago(param, **switches):
    """The same at the start of a second step: the buffer holds stale values, which must show up nowhere."""
    slot, buffer = hooked(param, **switches)
    slot.hand_over()
    slot.forget()
    buffer.grad_data.fill_(1000.0)
    return slot, buffer


@pytest.fixture(params=[hooked, one_step_ago], ids=["clean view", "stale view"])
def attach(request):
    return request.param


def weight(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values or (1.0, 1.0, 1.0), dtype=dtype))


class TestOnePass:
    def test_the_first_gradient_is_written_once(self, attach):
        param = weight()
        _, buffer = attach(param)
        version = buffer.grad_data._version

        (param * torch.tensor([1.0, 2.0, 3.0])).sum().backward()

        assert param.main_grad.tolist() == [1.0, 2.0, 3.0]
        assert buffer.grad_data._version == version + 1

    def test_every_further_gradient_is_added_once_by_autograd_itself(self, attach):
        param = weight()
        _, buffer = attach(param)
        (param * 2).sum().backward()
        version = buffer.grad_data._version

        for _ in range(3):
            (param * 5).sum().backward()

        assert param.main_grad.tolist() == [17.0] * 3  # 2 + 3 * 5
        assert buffer.grad_data._version == version + 3

    def test_grad_is_the_view_itself_so_plain_torch_code_sees_what_will_be_reduced(self, attach):
        param = weight()
        slot, _ = attach(param)

        (param * 2).sum().backward()
        param.grad.mul_(10)

        assert param.grad is slot.view is param.main_grad
        assert param.main_grad.tolist() == [20.0] * 3

    def test_starting_a_step_touches_no_memory(self, attach):
        param = weight()
        slot, buffer = attach(param)
        (param * 2).sum().backward()
        version = buffer.grad_data._version

        slot.forget()

        assert buffer.grad_data._version == version
        assert param.grad is None
        assert not slot.has_grad

    def test_a_16_bit_gradient_is_cast_in_the_same_pass(self, attach):
        param = weight(dtype=torch.bfloat16)
        _, buffer = attach(param)
        version = buffer.grad_data._version

        (param * 3).sum().backward()

        assert (param.grad.dtype, param.main_grad.dtype) == (torch.float32, torch.float32)
        assert param.main_grad.tolist() == [3.0] * 3
        assert buffer.grad_data._version == version + 1

    def test_16_bit_gradients_add_up_in_float32(self, attach):
        param = weight(dtype=torch.bfloat16)
        attach(param)

        (param * 256).sum().backward()
        (param * 1).sum().backward()

        assert param.main_grad.tolist() == [257.0] * 3  # bfloat16 has 8 bits and would stay at 256

    def test_16_bit_gradients_can_stay_16_bit(self, attach):
        param = weight(dtype=torch.bfloat16)
        attach(param, grad_reduce_in_fp32=False)

        (param * 256).sum().backward()
        (param * 1).sum().backward()

        assert param.main_grad.dtype is torch.bfloat16
        assert param.main_grad.tolist() == [256.0] * 3

    def test_the_memory_order_of_the_parameter_is_the_order_of_its_gradient(self, attach):
        param = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        attach(param)
        factors = torch.arange(120.0).reshape(2, 3, 4, 5)

        (param * factors).sum().backward()

        assert torch.equal(param.main_grad, factors)
        assert param.main_grad.is_contiguous(memory_format=torch.channels_last)

    def test_a_gradient_that_two_parameters_share_is_not_stolen(self):
        first, second = weight(), weight()
        (slot, _), _ = hooked(first), hooked(second)

        (first + second).sum().backward()  # autograd hands the same tensor to both
        slot.view.zero_()

        assert second.main_grad.tolist() == [1.0] * 3

    def test_a_scalar_and_an_empty_parameter_get_their_gradients(self, attach):
        scalar, empty = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.empty(0, 3))
        attach(scalar)
        empty_slot, _ = attach(empty)

        (scalar**2 + empty.sum()).backward()

        assert scalar.main_grad.item() == 4.0
        assert empty_slot.has_grad


class TestWhatTheCallerPutsIntoGrad:
    def test_a_gradient_set_before_backward_is_accumulated_on_as_in_torch(self, attach):
        param = weight()
        slot, _ = attach(param)
        param.grad = torch.full((3,), 10.0)

        (param * 2).sum().backward()

        assert param.main_grad.tolist() == [12.0] * 3
        assert param.grad is slot.view

    def test_a_gradient_replaced_between_microbatches_replaces_what_was_accumulated(self, attach):
        param = weight()
        attach(param)
        (param * 2).sum().backward()
        param.grad = param.grad * 0.5

        (param * 2).sum().backward()

        assert param.main_grad.tolist() == [3.0] * 3  # 2 * 0.5 + 2

    def test_a_gradient_replaced_after_the_last_backward_is_the_one_that_is_reduced(self, attach):
        param = weight()
        slot, _ = attach(param)
        (param * 2).sum().backward()
        param.grad = param.grad * 0.5

        assert slot.hand_over() is True
        assert slot.view.tolist() == [1.0] * 3

    def test_a_gradient_set_without_any_backward_is_the_one_that_is_reduced(self, attach):
        param = weight()
        slot, _ = attach(param)
        param.grad = torch.full((3,), 7.0)

        assert slot.hand_over() is True
        assert slot.view.tolist() == [7.0] * 3

    def test_a_gradient_cleared_in_the_middle_of_a_step_starts_anew(self, attach):
        param = weight()
        attach(param)
        (param * 2).sum().backward()
        param.grad = None  # what zero_grad() of any torch optimizer does

        (param * 5).sum().backward()

        assert param.main_grad.tolist() == [5.0] * 3

    def test_a_gradient_zeroed_in_place_starts_anew(self, attach):
        param = weight()
        attach(param)
        (param * 2).sum().backward()
        param.grad.zero_()

        (param * 5).sum().backward()

        assert param.main_grad.tolist() == [5.0] * 3

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    def test_a_differentiable_gradient_leaves_its_values_but_not_its_graph_in_the_buffer(self, attach):
        param = weight(1.0, 2.0, 3.0)
        _, buffer = attach(param)

        (param**2).sum().backward(create_graph=True)
        (param**2).sum().backward(create_graph=True)

        assert param.main_grad.tolist() == [4.0, 8.0, 12.0]  # twice 2 w
        assert not buffer.grad_data.requires_grad
        assert not param.main_grad.requires_grad

    def test_what_was_added_by_hand_to_a_zeroed_view_counts_beside_the_gradient(self, attach):
        param = weight()
        _, buffer = attach(param)
        buffer.zero_grads()
        param.main_grad.add_(100)

        (param * 2).sum().backward()

        assert param.main_grad.tolist() == [102.0] * 3


class TestHandOver:
    def test_without_a_gradient_stale_values_become_zero(self):
        param = weight()
        slot, _ = one_step_ago(param)

        assert slot.hand_over() is False
        assert slot.view.tolist() == [0.0] * 3

    def test_without_a_gradient_what_was_written_into_a_zeroed_view_stays(self):
        param = weight()
        slot, buffer = one_step_ago(param)
        buffer.zero_grads()
        param.main_grad.fill_(5)

        assert slot.hand_over() is False
        assert slot.view.tolist() == [5.0] * 3

    def test_afterwards_a_late_gradient_cannot_reach_the_buffer(self, attach):
        param = weight()
        slot, buffer = attach(param)
        (param * 2).sum().backward()
        slot.hand_over()
        version = buffer.grad_data._version
        param._post_accumulate_grad_hooks.clear()  # what autograd does alone, before any hook can refuse

        (param * 5).sum().backward()

        assert buffer.grad_data._version == version
        assert slot.view.tolist() == [2.0] * 3

    def test_publishing_shows_the_reduced_values_as_grad(self, attach):
        param = weight()
        slot, _ = attach(param)
        slot.hand_over()
        slot.view.fill_(4)

        slot.publish()

        assert param.grad.tolist() == [4.0] * 3


class TestSparse:
    @staticmethod
    def embedding(dtype=torch.float32):
        return torch.nn.Embedding(4, 2, sparse=True, dtype=dtype)

    def test_a_sparse_gradient_is_added_up_densely(self, attach):
        layer = self.embedding()
        slot, _ = attach(layer.weight)

        layer(torch.tensor([3, 1, 3])).sum().backward()

        assert layer.weight.main_grad.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]
        assert layer.weight.grad is slot.view

    def test_sparse_and_dense_gradients_of_one_step_add_up(self, attach):
        layer = self.embedding()
        attach(layer.weight)

        layer(torch.tensor([1])).sum().backward()
        layer(torch.tensor([1, 2])).sum().backward()
        (layer.weight * 10).sum().backward()

        assert layer.weight.main_grad.tolist() == [[10, 10], [12, 12], [11, 11], [10, 10]]

    def test_a_16_bit_sparse_gradient_is_widened(self, attach):
        layer = self.embedding(torch.bfloat16)
        attach(layer.weight)

        layer(torch.tensor([0, 0])).sum().backward()

        assert layer.weight.main_grad.dtype is torch.float32
        assert layer.weight.main_grad.tolist() == [[2, 2], [0, 0], [0, 0], [0, 0]]


class FusedLinear(torch.autograd.Function):
    """``x @ weight.T`` whose weight gradient goes into ``main_grad`` inside the kernel; autograd gets a dummy of NaN."""

    @staticmethod
    def forward(ctx, x, weight, dummy_value):
        ctx.save_for_backward(x)
        ctx.weight, ctx.dummy_value = weight, dummy_value
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ ctx.weight, torch.full_like(ctx.weight, ctx.dummy_value), None


def fused_backward(param, factor=1.0, dummy_value=float("nan")):
    """Adds ``factor`` to every element of the gradient of a (2, 3) weight."""
    FusedLinear.apply(torch.full((1, 3), factor), param, dummy_value).sum().backward()


class TestFusedKernels:
    @pytest.fixture
    def param(self):
        return torch.nn.Parameter(torch.ones(2, 3))

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    def test_a_kernel_cannot_add_beside_a_gradient_that_was_kept_with_its_graph(self, param):
        slot, _ = hooked(param)
        param._post_accumulate_grad_hooks.clear()
        (param**2).sum().backward(create_graph=True)
        slot.store(keeps_graph=True)
        param.register_post_accumulate_grad_hook(lambda _: slot.store())

        with pytest.raises(PhaseError, match="use the fused kernel in every microbatch"):
            fused_backward(param)

    def test_the_gradient_of_the_kernel_counts_and_the_dummy_is_dropped(self, param):
        slot, _ = hooked(param)

        fused_backward(param, 3.0)

        assert param.main_grad.tolist() == [[3.0] * 3] * 2
        assert param.grad is None
        assert param.grad_added_to_main_grad is False
        assert slot.has_grad

    def test_microbatches_add_up(self, param):
        hooked(param)

        for factor in (1.0, 2.0, 4.0):
            fused_backward(param, factor)

        assert param.main_grad.tolist() == [[7.0] * 3] * 2

    def test_an_autograd_gradient_after_the_kernel_is_added(self, param):
        slot, _ = hooked(param)

        fused_backward(param, 3.0)
        (param * 10).sum().backward()
        fused_backward(param, 1.0)

        assert param.main_grad.tolist() == [[14.0] * 3] * 2
        assert slot.hand_over() is True

    def test_the_next_step_starts_from_zero(self, param):
        slot, _ = hooked(param)
        fused_backward(param, 3.0)
        slot.hand_over()

        slot.forget()
        fused_backward(param, 2.0)

        assert param.main_grad.tolist() == [[2.0] * 3] * 2

    def test_a_step_by_autograd_alone_is_right_after_one_with_the_kernel(self, param):
        slot, _ = hooked(param)
        fused_backward(param, 3.0)
        slot.hand_over()

        slot.forget()
        (param * 5).sum().backward()

        assert param.main_grad.tolist() == [[5.0] * 3] * 2

    def test_a_kernel_that_appears_on_stale_values_is_an_error_that_names_the_parameter(self, param):
        one_step_ago(param)

        with pytest.raises(PhaseError) as caught:
            fused_backward(param)

        assert str(caught.value) == (
            "a fused kernel added the gradient of 'w' to main_grad, which was not prepared for it: the first gradient of a "
            "parameter that sometimes comes from a fused kernel needs zeros to add to. Call zero_grad_buffer() before each "
            "step of such a model, and use the fused kernel in every microbatch."
        )

    def test_after_that_error_the_next_step_is_right(self, param):
        slot, _ = one_step_ago(param)
        with pytest.raises(PhaseError):
            fused_backward(param)

        slot.forget()
        fused_backward(param, 2.0)

        assert param.main_grad.tolist() == [[2.0] * 3] * 2

    def test_after_that_error_a_step_by_autograd_is_right_too(self, param):
        slot, _ = one_step_ago(param)
        with pytest.raises(PhaseError):
            fused_backward(param)

        slot.forget()
        (param * 5).sum().backward()

        assert param.main_grad.tolist() == [[5.0] * 3] * 2

    def test_a_dummy_added_to_an_autograd_gradient_is_an_error_and_not_a_nan(self, param):
        hooked(param)
        (param * 5).sum().backward()

        with pytest.raises(PhaseError, match="a fused kernel added the gradient of 'w' to main_grad"):
            fused_backward(param)

    def test_a_kernel_on_reduced_values_is_an_error_although_it_was_known_before(self, param):
        slot, _ = hooked(param)
        fused_backward(param, 3.0)
        slot.hand_over()
        slot.publish()
        param.grad = None  # what zero_grad() of a plain torch optimizer does; nobody has zeroed the view

        with pytest.raises(PhaseError, match="Call zero_grad_buffer"):
            fused_backward(param, 2.0)

    def test_a_kernel_on_a_gradient_from_before_wrapping_is_an_error_once_it_was_cleared(self, param):
        param.grad = torch.full((2, 3), 50.0)
        hooked(param)
        param.grad = None

        with pytest.raises(PhaseError):
            fused_backward(param, 2.0)

    def test_zeros_written_for_the_kernel_by_zero_grad_buffer_are_enough(self, param):
        _, buffer = one_step_ago(param)
        buffer.zero_grads()

        fused_backward(param, 2.0)

        assert param.main_grad.tolist() == [[2.0] * 3] * 2

    def test_with_zero_out_wgrad_the_other_end_of_a_tied_weight_counts(self, param):
        param.zero_out_wgrad = True  # the kernel hands autograd zeros, onto which the other use of the weight is added
        hooked(param)

        both = FusedLinear.apply(torch.full((1, 3), 3.0), param, 0.0).sum() + (param * 10).sum()
        both.backward()

        assert param.main_grad.tolist() == [[13.0] * 3] * 2

    def test_a_flag_left_by_a_kernel_whose_backward_failed_is_cleared_by_the_next_step(self, param):
        slot, _ = hooked(param)
        param.grad_added_to_main_grad = True

        slot.forget()
        (param * 5).sum().backward()

        assert param.main_grad.tolist() == [[5.0] * 3] * 2
