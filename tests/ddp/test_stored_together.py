"""Small gradients come into the buffer together, in any order, and each is there once."""

from hypothesis import given
from hypothesis import strategies as st
from loop_ranks import Ranks, Weights, main_grads


def step(ddp, **factors):
    ddp(**factors).backward()
    ddp.finish_grad_sync()
    shown = main_grads(ddp.module)
    ddp.zero_grad()
    return shown


def learned(ddp, names="abcd"):
    """Run a step that adds to zeros and learns what to expect."""
    step(ddp, **dict.fromkeys(names, 1.0))


backwards = st.lists(st.tuples(st.permutations("abcdef"), st.integers(1, 6), st.booleans()), min_size=2, max_size=5)


@given(backwards, st.sampled_from([1, 250, 10_000]), st.booleans())
def test_whatever_comes_in_whatever_order_each_gradient_is_there_once(backwards, bucket_size, sharded):
    config = {"bucket_size": bucket_size, "use_distributed_optimizer": sharded, "unused_parameters": "zero"}
    (ddp,) = Ranks(1, Weights("abcdef"), **config).ddps
    learned(ddp, "abcdef")
    expected = dict.fromkeys("abcdef", 0.0)
    for order, count, accumulates in backwards:
        factors = {name: float(index) for index, name in enumerate(order[:count], start=1)}
        expected = {name: value + factors.get(name, 0.0) for name, value in expected.items()}
        if accumulates:
            with ddp.no_sync():
                ddp(**factors).backward()
        else:
            assert step(ddp, **factors) == expected
            expected = dict.fromkeys("abcdef", 0.0)
