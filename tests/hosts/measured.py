"""``torchrun ... -m hosts.measured FOLDER STEPS``: train the demo's model and count the bytes on the interfaces of each host.

First with shards inside a host and replicas across, then with shards over all ranks. The first rank of each host writes what it
counted to ``FOLDER/<host name>.json``.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import megabucket as mb
from examples.bytegpt.config import load_demo_config
from examples.bytegpt.steps import Trainee, train_step
from examples.bytegpt.task import make_optimizers, make_task, trainable_model
from megabucket.measure.ranks import joined_ranks

from .namespaces import INTERFACE, traffic_of

CONFIG = Path(__file__).parents[2] / "configs" / "bytegpt.yaml"
BUCKET_NUMEL = 400_000
"""Above the size from which ranks of one host copy: 1 MiB of float32 gradients are 262,144 elements."""

_WARM_UP_STEPS = 2
_QUIET_S = 0.5
_IDLE_S = 4.0
_TABLE = Path("/proc/net/dev")


def main(folder, num_steps):
    overrides = [f"ddp.bucket_size={BUCKET_NUMEL}", "train.num_microbatches=1", "data.held_out_every=20"]
    config = load_demo_config(CONFIG, overrides)
    with joined_ranks(os.environ) as ranks:
        task = make_task(config, trainable_model(config), ranks)
        num_local = int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (ranks.num_ranks // num_local, num_local)
        by_host = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        counted = {"by host": _count(task, by_host, num_steps), "one group": _count(task, None, num_steps)}
    if os.environ["LOCAL_RANK"] == "0":
        (Path(folder) / f"{socket.gethostname()}.json").write_text(json.dumps(counted))


def _count(task, group, num_steps):
    model = mb.DistributedDataParallel(task.build_model(), task.config.ddp, process_group=group)
    torch_optimizers = make_optimizers(task.config.program.optimizer, dict(model.named_parameters()))
    optimizer = mb.DistributedOptimizer(torch_optimizers, model, clip_grad=task.config.program.optimizer.clip_grad)
    trainee = Trainee("counted", model, torch_optimizers, optimizer.zero_grad, model.no_sync, optimizer.step, model.step)
    batches = [task.microbatches(step) for step in range(_WARM_UP_STEPS + num_steps)]
    for batch in batches[:_WARM_UP_STEPS]:
        train_step(trainee, batch)
    before = _traffic_at_rest()
    started_s = time.monotonic()
    for batch in batches[_WARM_UP_STEPS:]:
        train_step(trainee, batch)
    steps_s = time.monotonic() - started_s
    after = _traffic_at_rest()
    time.sleep(_IDLE_S)
    idle = _traffic()
    result = {
        "num_steps": num_steps,
        "step_s": steps_s / num_steps,
        "bucket_numels": [bucket.numel for buffer in model.layout.buffers for bucket in buffer.buckets],
        "steps": {name: after[name] - before[name] for name in before},
        "idle": {name: idle[name] - after[name] for name in before},
        "idle_s": _IDLE_S,
    }
    model.detach()
    return result


def _traffic():
    return {interface: traffic_of(_TABLE, interface) for interface in (INTERFACE, "lo")}


def _traffic_at_rest():
    """Return the counters when the last step of all ranks has left the wire, its gather of parameters included."""
    dist.barrier()
    time.sleep(_QUIET_S)
    return _traffic()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
