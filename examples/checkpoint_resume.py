"""A run that stops half-way and resumes ends with the weights of a run that did not stop, dropout included.

torchrun --standalone --nproc-per-node 2 examples/checkpoint_resume.py
"""

import os
import tempfile

import torch
import torch.distributed as dist

import megabucket as mb

STEPS = 20


class Run:
    """A model with its optimizer and its schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(64, 8))
        config = mb.DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
        self.model = mb.DistributedDataParallel(module.bfloat16(), config)
        self.optimizer = mb.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2), self.model, clip_grad=1.0)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        torch.manual_seed(1000 * seed + self.model.communicator.rank)  # dropout differs between ranks

    def train(self, first: int, last: int, checkpoints: mb.Checkpointer | None = None) -> float:
        loss = torch.zeros(())
        for step in range(first, last):
            generator = torch.Generator().manual_seed(2 * step + self.model.communicator.rank)
            inputs = torch.randn(16, 32, generator=generator).bfloat16()
            loss = (self.model(inputs) - inputs[:, :8]).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            if checkpoints is not None and (step + 1) % 5 == 0:
                checkpoints.save(step + 1, data_position={"step": step + 1})
        return loss.item()

    def checkpoints(self, root: str) -> mb.Checkpointer:
        return mb.Checkpointer(root, self.model, self.optimizer, schedulers=self.schedule, asynchronous=True)


def main() -> None:
    dist.init_process_group("gloo")
    roots = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(roots)

    first = Run(seed=0)
    with first.checkpoints(roots[0]) as checkpoints:
        first.train(0, STEPS // 2, checkpoints)
    expected = first.train(STEPS // 2, STEPS)

    second = Run(seed=1)  # as a new process would
    loaded = second.checkpoints(roots[0]).load()
    found = second.train(loaded.data_position["step"], STEPS)

    weights = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    same = found == expected and all(torch.equal(one, other) for one, other in weights)
    if dist.get_rank() == 0:
        print(f"saved at step {loaded.step} by {loaded.world_size} ranks, resumed, trained to step {STEPS}")
        print(f"loss {expected:.6f} without a stop, {found:.6f} with one; the same weights, bit by bit: {same}")
    dist.barrier()  # no rank ends while another one communicates
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    assert "RANK" in os.environ, __doc__
    main()
