"""Weights from training ranks to a process that generates: each phase trains some steps, sends the weights in chunks, samples.

torchrun --standalone --nproc-per-node 3 examples/weights_to_generator.py

The last rank generates. It has a plain module and no wrapper.
"""

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

import megabucket as mb

VOCABULARY, WIDTH, PHASES, STEPS, CHUNK_BYTES = 64, 64, 4, 8, 16 << 10


class Model(nn.Module):
    """Predicts a token from the one before it. The weight of the head is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden)))))

    @torch.no_grad()
    def generate(self, token: int, length: int) -> list[int]:
        sample = [token]
        while len(sample) < length:
            sample.append(int(self(torch.tensor(sample[-1:])).argmax()))
        return sample


def follower(tokens: torch.Tensor) -> torch.Tensor:
    """Return what the model is to learn."""
    return (5 * tokens + 1) % VOCABULARY


def checksums(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: crc32(value.contiguous().numpy().tobytes()) for name, value in weights.items()}


def send(model: mb.DistributedDataParallel, rank: int, num_trainers: int) -> None:
    """Send all weights to the last rank. The training ranks hold the same, so each of them sends some of the chunks."""
    chunks = list(model.export_weights(max_bytes=CHUNK_BYTES))  # views of the parameter buffers
    if rank == 0:
        dist.send_object_list([[chunk.header() for chunk in chunks]], dst=num_trainers)
    for index, chunk in enumerate(chunks):
        if index % num_trainers == rank:
            dist.send(chunk.tensor, dst=num_trainers, tag=index)


def receive(num_trainers: int) -> dict[str, torch.Tensor]:
    """Return all weights by name."""
    headers: list[list[dict[str, Any]]] = [[]]
    dist.recv_object_list(headers, src=0)
    chunks = [mb.WeightChunk.from_header(header) for header in headers[0]]
    works = [dist.irecv(chunk.tensor, src=index % num_trainers, tag=index) for index, chunk in enumerate(chunks)]
    for work in filter(None, works):
        work.wait()
    return mb.named_weights(chunks)


def train(rank: int, num_trainers: int, group: dist.ProcessGroup) -> list[dict[str, int]]:
    """Train and send. Return the checksums of the weights at the end of each phase."""
    torch.manual_seed(0)
    config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=10_000)
    model = mb.DistributedDataParallel(Model(), config, process_group=group)
    optimizer = mb.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, clip_grad=1.0)
    found = []
    for phase in range(PHASES):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(num_trainers * (phase * STEPS + step) + rank)
            tokens = torch.randint(VOCABULARY, (32,), generator=generator)
            nn.functional.cross_entropy(model(tokens), follower(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
        send(model, rank, num_trainers)
        found.append(checksums(model.state_dict()))
    model.detach()
    return found


def generate(num_trainers: int) -> tuple[list[dict[str, int]], list[int]]:
    """Receive and generate. Return the checksums of the weights, and how many of 20 tokens are right, by phase."""
    model, found, right = Model(), [], []
    for phase in range(PHASES):
        weights = receive(num_trainers)
        model.load_state_dict(weights)
        sample = torch.tensor(model.generate(phase + 1, 21))
        found.append(checksums(model.state_dict()))
        right.append(int((follower(sample[:-1]) == sample[1:]).sum()))
        print(f"phase {phase}: {right[-1]} of 20 tokens are right: {sample.tolist()}")
    return found, right


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_trainers = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group(range(num_trainers))
    found = train(rank, num_trainers, group) if rank < num_trainers else generate(num_trainers)[0]
    of_all = [None] * (num_trainers + 1)
    dist.all_gather_object(of_all, found)
    if any(one != found for one in of_all):
        raise SystemExit("the weights that generate are not those that were trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
