"""The base of decorators, and the memory that a communicator gives a wrapper."""

import pytest
import torch

import megabucket as mb
from megabucket.comm import AllReduce, Communicator, ForwardingCommunicator, LocalCommunicator
from megabucket.errors import ConfigError, PeerLostError
from megabucket.testing import ListRecorder, LoopbackWorld


class Pool(ForwardingCommunicator):
    """Allocates from one tensor of bytes, which is not zero."""

    def __init__(self, inner: Communicator, num_bytes: int) -> None:
        super().__init__(inner)
        self.memory, self.num_taken = torch.full((num_bytes,), 0x55, dtype=torch.uint8), 0

    def allocate(self, numel, dtype, device):
        start, self.num_taken = self.num_taken, self.num_taken + numel * dtype.itemsize
        return self.memory[start : self.num_taken].view(dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()


class Short(ForwardingCommunicator):
    def allocate(self, numel, dtype, device):
        return super().allocate(numel - 1, dtype, device)


def trained(communicator: Communicator) -> torch.Tensor:
    """Return the parameters after three steps, of which every rank sees other data."""
    module = torch.nn.Linear(3, 5)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1.0, 1.0, 15).view(5, 3))  # ranks are threads, which share the random generator
        module.bias.zero_()
    ddp = mb.DistributedDataParallel(module, communicator=communicator)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        ddp(torch.full((2, 3), 1.0 + step + communicator.rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in ddp.parameters()])


def test_the_buffers_of_a_wrapper_lie_in_memory_of_its_communicator():
    pool = Pool(LocalCommunicator(), 1 << 12)

    (buffer,) = mb.DistributedDataParallel(torch.nn.Linear(3, 5), communicator=pool).param_and_grad_buffers

    assert pool.holds(buffer.param_data)
    assert pool.holds(buffer.grad_data)
    assert pool.num_taken == 2 * 4 * buffer.layout.numel


def test_training_in_memory_of_a_pool_gives_the_same_bits():
    def run(is_pooled):
        world = LoopbackWorld(2)
        around = [world.communicator(rank) for rank in range(2)]
        return world.run(lambda rank: trained(Pool(around[rank], 1 << 12) if is_pooled else around[rank]))

    pooled, plain = run(True), run(False)

    assert [ours.tolist() for ours in pooled] == [theirs.tolist() for theirs in plain]


def test_padding_is_zero_whatever_the_memory_held():
    pool = Pool(LocalCommunicator(), 1 << 12)
    (buffer,) = mb.DistributedDataParallel(torch.nn.Linear(3, 5), communicator=pool).param_and_grad_buffers

    assert buffer.param_data.count_nonzero() <= 20  # 3 * 5 + 5 parameters
    assert buffer.grad_data.view(torch.int32).unique().tolist() == [-(1 << 31)]  # -0.0


def test_memory_of_another_size_is_refused():
    with pytest.raises(ConfigError, match=r"Short.allocate\(.*\) has returned a tensor of shape"):
        mb.DistributedDataParallel(torch.nn.Linear(3, 5), communicator=Short(LocalCommunicator()))


def test_a_decorator_is_the_same_rank_at_the_same_place():
    inner = LoopbackWorld(3).subgroup([2, 0])[0]
    outer = ForwardingCommunicator(inner)

    outer.progress.enter(7, "forward")

    assert (outer.rank, outer.size, tuple(outer.members)) == (1, 2, (2, 0))
    assert (inner.progress.step, outer.control) == (7, inner.control)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_launch_is_one_launch_of_the_inner_communicator(is_prepared):
    world, recorder = LoopbackWorld(2), ListRecorder()
    outer, tensors = ForwardingCommunicator(world.communicator(0, recorder)), [torch.tensor([1.0]), torch.tensor([2.0])]
    calls = [AllReduce(tensors[0])]

    handle = outer.launch(outer.prepare(calls) if is_prepared else calls, label="sum")
    world.communicator(1).launch([AllReduce(tensors[1])], label="sum")
    handle.wait()

    assert world.schedule(0) == ("sum [all_reduce sum of 1 x float32]",)
    assert [record.label for record in recorder.collectives] == ["sum"]
    assert tensors[0].tolist() == [3.0]


def test_a_rank_that_breaks_off_tells_the_others_through_a_decorator():
    world = LoopbackWorld(2)
    lost = PeerLostError(ranks=(1,), states=("died",), during="")

    ForwardingCommunicator(world.communicator(0)).break_off(lost)

    with pytest.raises(PeerLostError):
        world.communicator(1).launch([AllReduce(torch.ones(1))], label="sum")
