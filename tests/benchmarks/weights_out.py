"""400 MB of weights from a training rank to another process over gloo: in chunks, or the ``state_dict`` tensor by tensor.

    OMP_NUM_THREADS=1 python tests/benchmarks/weights_out.py [--turns 15]

A GPT of 16 layers has 195 tensors, 100 million float32 values. Names and shapes are sent once for each transfer in both ways.
"tensor by tensor" receives into the tensors of a plain module; "chunks" receive into memory that is there already, so that an
engine can read them; "chunks, loaded" copies them into a plain module as well. The sender's clock stops with the answer of the
receiver. All take turns in one run.
"""

import argparse
import os
import socket
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from paired import interleave, ratio, timed

import megabucket as mb
from megabucket.units import MIB

WIDTH, LAYERS, VOCABULARY = 704, 16, 7000


def make_model() -> torch.nn.Module:
    """Return a module with the parameters of a GPT, without its forward."""

    def layer() -> torch.nn.Module:
        linear = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        norms = {name: torch.nn.LayerNorm(WIDTH) for name in ("norm", "mlp_norm")}
        return torch.nn.ModuleDict({**{name: torch.nn.Linear(*shape) for name, shape in linear.items()}, **norms})

    embedding, norm = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.LayerNorm(WIDTH)
    return torch.nn.ModuleDict(
        {"embedding": embedding, "norm": norm, "layers": torch.nn.ModuleList(layer() for _ in range(LAYERS))}
    )


class Sender:
    """The training rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self.ddp = mb.DistributedDataParallel(make_model(), process_group=group)

    def chunks(self, max_bytes: int) -> None:
        chunks = list(self.ddp.export_weights(max_bytes=max_bytes))
        dist.send_object_list([[chunk.header() for chunk in chunks]], dst=1)
        for chunk in chunks:
            dist.send(chunk.tensor, dst=1)
        wait_for_answer()

    def tensors(self) -> None:
        weights = self.ddp.state_dict()
        dist.send_object_list([[(name, value.shape, value.dtype) for name, value in weights.items()]], dst=1)
        for value in weights.values():
            dist.send(value, dst=1)
        wait_for_answer()


class Receiver:
    """The process that has a plain module."""

    def __init__(self) -> None:
        self.module = make_model()
        self.memory = torch.zeros(sum(param.numel() + 64 for param in self.module.parameters()))

    def chunks(self, *, loads: bool) -> None:
        chunks, begin = [], 0
        for header in received_object():
            chunks.append(mb.WeightChunk.from_header(header, self.memory[begin : begin + header["numel"]]))
            begin += header["numel"]
            dist.recv(chunks[-1].tensor, src=0)
        weights = mb.named_weights(chunks)
        if loads:
            self.module.load_state_dict(weights)
        answer()

    def tensors(self) -> None:
        weights = self.module.state_dict()
        for name, shape, dtype in received_object():
            assert (weights[name].shape, weights[name].dtype) == (shape, dtype)
            dist.recv(weights[name], src=0)
        answer()


def received_object() -> list:
    received = [None]
    dist.recv_object_list(received, src=0)
    return received[0]


def wait_for_answer() -> None:
    dist.recv(torch.zeros(1), src=1)


def answer() -> None:
    dist.send(torch.zeros(1), dst=0)


def main(rank: int, port: int, turns: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.new_group([0])
    if rank == 0:
        sender = Sender(group)
        candidates: dict[str, Callable[[], None]] = {
            "tensor by tensor": sender.tensors,
            "chunks of 512 MiB": partial(sender.chunks, 512 * MIB),
            "chunks of 64 MiB": partial(sender.chunks, 64 * MIB),
            "chunks of 64 MiB, loaded": partial(sender.chunks, 64 * MIB),
        }
    else:
        receiver = Receiver()
        candidates = {
            "tensor by tensor": receiver.tensors,
            "chunks of 512 MiB": partial(receiver.chunks, loads=False),
            "chunks of 64 MiB": partial(receiver.chunks, loads=False),
            "chunks of 64 MiB, loaded": partial(receiver.chunks, loads=True),
        }
    for candidate in candidates.values():
        candidate()
    seconds = interleave({name: timed(candidate) for name, candidate in candidates.items()}, repetitions=turns)
    if rank == 0:
        params = list(sender.ddp.module.parameters())
        print(f"{len(params)} tensors, {sum(param.nbytes for param in params) / 1e6:.0f} MB, {turns} turns")
        for name, values in seconds.items():
            middle, low, high = ratio(seconds, name, "tensor by tensor")
            print(f"{name:26} {statistics.median(values):.3f} s   / tensor by tensor: {middle:.3f} ({low:.3f} to {high:.3f})")
        with torch.no_grad():
            whole = timed(lambda: [None for _ in sender.ddp.export_weights(max_bytes=64 * MIB)])
            print(f"an export of views alone: {statistics.median(whole() for _ in range(turns)) * 1e3:.2f} ms")
        sender.ddp.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    chosen = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(main, args=(free, chosen.turns), nprocs=2)
