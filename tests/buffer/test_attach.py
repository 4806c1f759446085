"""Moving parameters into a buffer changes where they live, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabucket.buffer import ParamAndGradBuffer, dtype_name, view_like
from megabucket.buffer.param_and_grad_buffer import dense_strides
from megabucket.config import DistributedDataParallelConfig
from megabucket.layout import ParamSpec, build_layout


def attach(params, *, dp_size=1, **switches):
    """Move the parameters (by name) into one buffer."""
    specs = [ParamSpec(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in params.items()]
    (layout,) = build_layout(specs, DistributedDataParallelConfig(**switches), dp_size=dp_size).buffers
    return ParamAndGradBuffer(layout, params)


def attach_one(tensor, **switches):
    param = torch.nn.Parameter(tensor)
    return param, attach({"w": param}, **switches)


def bits(tensor):
    """The elements in logical order, as integers."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(words[tensor.itemsize])


MEMORY_ORDERS = {
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(4, 6).t(),
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice of columns": lambda: torch.arange(24.0).reshape(4, 6)[:, 1:3],
    "every second row": lambda: torch.arange(24.0).reshape(4, 6)[::2],
    "slice of a transposed": lambda: torch.arange(24.0).reshape(4, 6).t()[1:4],
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 7),
    "one element": lambda: torch.ones(1, 1, 1),
}


@pytest.fixture(params=MEMORY_ORDERS, ids=lambda name: name.replace(" ", "-"))
def tensor(request):
    return MEMORY_ORDERS[request.param]()


class TestParameterView:
    def test_the_parameter_is_the_same_object_with_the_same_values(self, tensor):
        before = tensor.clone()

        param, _ = attach_one(tensor)

        assert isinstance(param, torch.nn.Parameter)
        assert param.requires_grad
        assert torch.equal(param.detach(), before)

    def test_the_view_lies_in_the_storage_of_the_buffer(self, tensor):
        first = torch.nn.Parameter(torch.ones(5))
        param = torch.nn.Parameter(tensor)

        buffer = attach({"w": param, "last": first})  # the last registered comes first: w starts at 64

        assert param.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
        assert param.storage_offset() == 64
        if param.numel():
            assert param.data_ptr() == buffer.param_data.data_ptr() + 64 * 4  # float32
            assert param.main_grad.data_ptr() == buffer.grad_data.data_ptr() + 64 * 4

    def test_the_gradient_view_has_the_shape_and_strides_of_the_parameter(self, tensor):
        param, buffer = attach_one(tensor)

        assert param.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
        assert param.main_grad.shape == param.shape
        assert param.main_grad.stride() == param.stride()

    @pytest.mark.parametrize(
        ("name", "strides"),
        [
            ("contiguous", (12, 4, 1)),
            ("transposed", (1, 6)),  # (6, 4), columns one after the other
            ("permuted", (1, 12, 4)),
            ("channels_last", (60, 1, 15, 3)),
            ("slice of columns", (2, 1)),  # had holes: (4, 2) of rows of 6, now dense
            ("every second row", (6, 1)),
            ("slice of a transposed", (1, 3)),  # (3, 4) with strides (1, 6) closes up and stays column by column
        ],
    )
    def test_strides_are_kept_where_the_tensor_was_dense_and_their_order_where_it_had_holes(self, name, strides):
        param, _ = attach_one(MEMORY_ORDERS[name]())

        assert param.stride() == strides

    def test_an_empty_parameter_keeps_its_shape_and_takes_no_room(self):
        param, buffer = attach_one(torch.empty(0, 7))

        assert param.shape == (0, 7)
        assert buffer.layout.numel == 0

    def test_a_scalar_takes_one_element(self):
        param, buffer = attach_one(torch.tensor(3.0))

        assert param.shape == ()
        assert buffer.layout.params["w"].numel == 1
        assert buffer.param_data[0].item() == 3.0

    def test_the_original_storage_is_released(self):
        original = torch.ones(100)
        param, _ = attach_one(original)

        param.detach().fill_(2)

        assert torch.equal(original, torch.ones(100))


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=dtype_name)
    def test_every_bit_pattern_survives_also_nan_payloads_and_negative_zero(self, dtype):
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        limits = torch.iinfo(words)
        patterns = torch.randint(limits.min, limits.max, (5_000,), dtype=words)
        patterns[:3] = torch.tensor([limits.min, -1, -2])  # -0.0, and two quiet nans with different payloads
        param, _ = attach_one(patterns.clone().view(dtype).reshape(50, 100).t())

        assert torch.equal(bits(param).t().reshape(-1), patterns)

    def test_padding_and_gaps_are_zero(self):
        buffer = attach({name: torch.nn.Parameter(torch.ones(70)) for name in "ab"}, dp_size=3)

        # b at [0, 70), a at [128, 198), end at a multiple of lcm(3, 128) = 384
        assert buffer.param_data.numel() == 384
        assert buffer.param_data.nonzero().flatten().tolist() == [*range(70), *range(128, 198)]
        assert buffer.grad_data.count_nonzero() == 0


# Parameters in every memory order, made by permuting the dimensions of a dense tensor and, perhaps, cutting holes into it.
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def odd_tensors(draw):
    """Dense or holey tensors of at most four dimensions. Shrinks towards an empty vector."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    tensor = torch.zeros(tuple(2 * size for size in shape) if draw(st.booleans()) else shape)
    return tensor[tuple(slice(size) for size in shape)].permute(order)


@given(
    tensors=st.lists(odd_tensors(), min_size=1, max_size=6),
    dp_size=st.integers(1, 4),
    bucket_size=st.integers(1, 400),
    grad_side=st.booleans(),
)
def test_views_are_a_bijection_onto_the_buffer_without_its_padding(tensors, dp_size, bucket_size, grad_side):
    params = {f"p{i}": torch.nn.Parameter(tensor) for i, tensor in enumerate(tensors)}
    buffer = attach(params, dp_size=dp_size, bucket_size=bucket_size)
    flat = buffer.grad_data if grad_side else buffer.param_data

    written = 0
    for param in params.values():
        view = param.main_grad if grad_side else param.detach()
        view.copy_(torch.arange(written + 1.0, written + 1 + param.numel()).reshape(param.shape))
        written += param.numel()

    inside = torch.cat([torch.arange(slot.start, slot.stop) for slot in buffer.layout.params.values()]).long()
    assert torch.equal(flat[inside].sort().values, torch.arange(1.0, written + 1))  # each number once
    assert flat.count_nonzero() == written  # and nothing on the padding
    for name, param in params.items():
        slot = buffer.layout.params[name]
        view = param.main_grad if grad_side else param.detach()
        assert torch.equal(view.reshape(-1).sort().values, flat[slot.start : slot.stop].sort().values)


@given(tensor=odd_tensors())
def test_dense_strides_are_those_of_a_dense_copy(tensor):
    copy = torch.empty_like(tensor)

    assert dense_strides(tensor) == copy.stride()


def test_a_view_counts_from_the_start_of_what_it_is_a_view_of():
    flat = torch.arange(20.0)[4:]

    assert view_like(flat, 2, (2, 3), (3, 1)).tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert view_like(flat, 0, (2,), (1,)).tolist() == [4.0, 5.0]


class TestBuckets:
    def test_a_bucket_is_a_view_of_both_buffers(self):
        params = {name: torch.nn.Parameter(torch.ones(100)) for name in "abc"}
        buffer = attach(params, bucket_size=100)

        last = buffer.buckets[2]  # of a, at [256, 356) and padded to 384

        assert [bucket.layout.start for bucket in buffer.buckets] == [0, 128, 256]
        assert (last.layout.index, last.layout.numel_unpadded, last.param_data.numel()) == (2, 100, 128)
        assert [slot.param for slot in last.slots] == [params["a"]]
        assert last.param_data.data_ptr() == params["a"].data_ptr()
        assert last.grad_data.data_ptr() == params["a"].main_grad.data_ptr()

    def test_shards_are_equal_parts_of_the_bucket(self):
        buffer = attach({"a": torch.nn.Parameter(torch.ones(100)), "b": torch.nn.Parameter(torch.ones(100))}, dp_size=2)
        (bucket,) = buffer.buckets

        shards = [bucket.shard(bucket.grad_data, rank) for rank in range(2)]

        assert [shard.numel() for shard in shards] == [128, 128]
        assert shards[1].data_ptr() == bucket.grad_data.data_ptr() + 128 * 4


class TestGradientsFromBefore:
    def test_a_gradient_is_kept_and_lives_in_the_buffer(self):
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.tensor([1.0, 2.0, 3.0])

        buffer = attach({"w": param})

        assert param.grad is param.main_grad
        assert buffer.grad_data[:3].tolist() == [1.0, 2.0, 3.0]

    def test_the_next_gradient_is_added_to_it(self):
        param = torch.nn.Parameter(torch.ones(3))
        param.grad = torch.tensor([1.0, 2.0, 3.0])
        attach({"w": param})

        (param * 10).sum().backward()

        assert param.main_grad.tolist() == [11.0, 12.0, 13.0]

    def test_a_sparse_gradient_becomes_dense(self):
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        embedding(torch.tensor([1, 3, 3])).sum().backward()

        attach({"w": embedding.weight})

        assert embedding.weight.main_grad.tolist() == [[0, 0], [1, 1], [0, 0], [2, 2]]

    def test_a_16_bit_gradient_is_widened(self):
        param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        param.grad = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)

        buffer = attach({"w": param})

        assert buffer.grad_data.dtype is torch.float32
        assert param.grad.tolist() == [1.5, 2.5]

    def test_without_one_grad_stays_none(self):
        param, _ = attach_one(torch.ones(3))

        assert param.grad is None
        assert param.grad_added_to_main_grad is False


class TestDetach:
    def test_every_parameter_has_a_storage_of_its_own_with_current_values_and_strides(self, tensor):
        other = torch.nn.Parameter(torch.ones(5))
        param = torch.nn.Parameter(tensor)
        buffer = attach({"w": param, "other": other})
        with torch.no_grad():
            param.add_(1)
        values, strides = param.detach().clone(), param.stride()

        buffer.detach()

        storages = {tensor.untyped_storage().data_ptr() for tensor in (param, other, buffer.param_data) if tensor.numel()}
        assert len(storages) == (3 if param.numel() else 2)
        assert torch.equal(param.detach(), values)
        assert param.stride() == strides

    def test_the_buffer_can_change_without_the_parameter(self):
        param, buffer = attach_one(torch.ones(3))
        buffer.detach()

        buffer.param_data.zero_()
        buffer.grad_data.fill_(7)

        assert param.tolist() == [1.0, 1.0, 1.0]
        assert param.grad is None

    def test_what_attaching_has_set_is_gone(self):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        attributes = set(vars(param))
        buffer = attach({"w": param})

        buffer.detach()

        assert set(vars(param)) == attributes
        assert param.grad_dtype is torch.bfloat16

    def test_a_grad_dtype_that_the_user_had_set_comes_back(self):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        param.grad_dtype = torch.float32
        buffer = attach({"w": param})

        buffer.detach()

        assert param.grad_dtype is torch.float32

    def test_plain_training_goes_on(self):
        param, buffer = attach_one(torch.ones(3))
        (param * 5).sum().backward()
        buffer.detach()

        (param * 2).sum().backward()

        assert param.grad.tolist() == [2.0, 2.0, 2.0]
        assert buffer.grad_data.untyped_storage().data_ptr() != param.grad.untyped_storage().data_ptr()

    def test_a_second_call_does_nothing(self):
        param, buffer = attach_one(torch.ones(3))
        buffer.detach()
        pointer = param.data_ptr()

        buffer.detach()

        assert param.data_ptr() == pointer


class TestZeroing:
    def test_zero_grads_zeroes_the_padding_too(self):
        _, buffer = attach_one(torch.ones(3))
        buffer.grad_data.fill_(float("nan"))

        buffer.zero_grads()

        assert torch.equal(buffer.grad_data, torch.zeros(128))
