"""What stands in for a gradient: it can be looked at, autograd can add to it, and everything else is refused by name."""

import copy
import gc
import warnings
import weakref

import pytest
import torch

from megabucket.buffer import WithheldGrad
from megabucket.errors import PhaseError


def withheld(param, *, like=None, accumulates=True):
    like = torch.zeros_like(param) if like is None else like
    return WithheldGrad(like, what="the gradient of 'w'", reason="is busy. Wait.", accumulates=lambda: accumulates)


def param_of(*shape, **kwargs):
    param = torch.nn.Parameter(torch.ones(*shape))
    param.grad = withheld(param, **kwargs)
    return param


SCALER = torch.amp.GradScaler("cpu")
SCALER.scale(torch.ones(()))


def with_optimizer(act):
    return lambda param: act(torch.optim.SGD([param, torch.nn.Parameter(torch.ones(1))], lr=1.0))


USES = {
    "clip_grad_norm_": (lambda param: torch.nn.utils.clip_grad_norm_([param], 1.0), "linalg_vector_norm"),
    "clip_grad_norm_ of infinity": (
        lambda param: torch.nn.utils.clip_grad_norm_([param], 1.0, float("inf")),
        "linalg_vector_norm",
    ),
    "clip_grad_norm_ foreach": (lambda param: torch.nn.utils.clip_grad_norm_([param], 1.0, foreach=True), "_foreach_norm"),
    "clip_grad_value_": (lambda param: torch.nn.utils.clip_grad_value_([param], 1.0), "clamp_"),
    "clip_grad_value_ foreach": (
        lambda param: torch.nn.utils.clip_grad_value_([param], 1.0, foreach=True),
        "_foreach_clamp_min_",
    ),
    "GradScaler.unscale_": (with_optimizer(SCALER.unscale_), "_amp_foreach_non_finite_check_and_unscale_"),
    "optimizer.step": (with_optimizer(lambda optimizer: optimizer.step()), "add_"),
    "zero_grad in place": (with_optimizer(lambda optimizer: optimizer.zero_grad(set_to_none=False)), "_foreach_zero_|zero_"),
    "mul_": (lambda param: param.grad.mul_(0.5), "mul_"),
    ".data": (lambda param: param.grad.data, "detach"),
    "read into another": (lambda param: torch.zeros(2, 3).copy_(param.grad), "copy_"),
    "isfinite": (lambda param: torch.isfinite(param.grad), "abs"),
    "indexed": (lambda param: param.grad[0], "select"),
    "deepcopy": (lambda param: copy.deepcopy(param.grad), "clone"),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_it_is_told_what_it_is_and_why(use):
    act, operation = USES[use]

    with pytest.raises(PhaseError, match=rf"^({operation}) was called on the gradient of 'w', which is busy\. Wait\.$"):
        act(param_of(2, 3))


def test_what_needs_no_values_may_be_looked_at():
    grad = param_of(2, 3).grad

    assert (grad.shape, grad.dtype, grad.device.type, grad.is_sparse, grad.requires_grad) == (
        (2, 3),
        torch.float32,
        "cpu",
        False,
        False,
    )
    assert repr(grad) == f"{grad}" == "<the gradient of 'w': withheld, because it is busy. Wait.>"


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_it_stands_in_for_every_shape_and_for_another_dtype(shape):
    param = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    param.grad_dtype = None

    param.grad = withheld(param, like=torch.zeros(shape))

    assert isinstance(param.grad, WithheldGrad)


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_a_module_that_is_converted_converts_it_to_one_that_refuses_as_well(convert):
    module = torch.nn.Linear(2, 2)
    module.weight.grad = withheld(module.weight)

    getattr(module, convert)()

    assert module.weight.grad.dtype == module.weight.dtype != torch.float32
    with pytest.raises(PhaseError, match=r"^sum was called on the gradient of 'w'"):
        module.weight.grad.sum()


def test_clearing_by_none_works():
    param = param_of(2)

    torch.optim.SGD([param], lr=1.0).zero_grad()

    assert param.grad is None


def test_a_copy_of_the_parameter_has_no_gradient():
    module = torch.nn.Linear(2, 2)
    module.weight.grad = withheld(module.weight)

    assert copy.deepcopy(module).weight.grad is None


@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_adds_to_what_it_stands_for(create_graph):
    like = torch.full((2,), 5.0)
    param = param_of(2, like=like)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about reference cycles
        (param**2).sum().backward(create_graph=create_graph)

    total = param.grad.detach() if create_graph else like  # a new sum, as with any gradient, or in place
    assert total.tolist() == [7.0, 7.0]  # 5 + 2 * 1
    assert isinstance(param.grad, WithheldGrad) != create_graph


@pytest.mark.parametrize("create_graph", [False, True])
def test_while_it_may_not_be_added_to_autograd_changes_nothing(create_graph):
    like = torch.full((2,), 5.0)
    param = param_of(2, like=like, accumulates=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (param**2).sum().backward(create_graph=create_graph)

    assert like.tolist() == [5.0, 5.0]


def test_outside_of_a_backward_nobody_adds_to_it():
    param = param_of(2)

    with pytest.raises(PhaseError, match=r"^add_ was called"):
        param.grad.add_(torch.ones(2))


def test_it_keeps_no_parameter_alive():
    param = param_of(2)
    gone = weakref.ref(param)

    del param
    gc.collect()

    assert gone() is None


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch says so of Python 3.13.0
def test_a_compiled_module_may_run_while_it_is_there():
    module = torch.nn.Linear(2, 2)
    module.weight.grad = withheld(module.weight)

    assert torch.compile(module, backend="aot_eager")(torch.ones(1, 2)).shape == (1, 2)
