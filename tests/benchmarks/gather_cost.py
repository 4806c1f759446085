"""What a gather of parameters takes: torch's own on gloo, and the port's, a broadcast of each part. Paired, in changing order.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tests/benchmarks/gather_cost.py
"""

import statistics
import time

import torch
import torch.distributed as dist

from megabucket.comm import AllGather, ProcessGroupCommunicator

SIZES_KIB = (4, 16, 64, 256, 1024, 4096, 16384, 65536)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator, rank, num_ranks = ProcessGroupCommunicator(None), dist.get_rank(), dist.get_world_size()
    gather_of_torch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for size_kib in SIZES_KIB:
        full = torch.zeros(num_ranks, size_kib * 256 // num_ranks)
        calls = communicator.prepare([AllGather(full.view(-1), full[rank])])
        candidates = {
            "torch": lambda full=full: gather_of_torch(full.view(-1), full[rank]),
            "ours": lambda calls=calls: communicator.launch(calls, label="gather").wait(),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
        for index in range(60 if size_kib <= 1024 else 20):
            for name in sorted(candidates, reverse=bool(index % 2)):
                dist.barrier()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                candidates[name]()
                times[name].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
        if rank == 0:
            wall, cpu = (
                {name: statistics.median(row[which] for row in rows) for name, rows in times.items()} for which in (0, 1)
            )
            paired = statistics.median(ours[0] / torchs[0] for ours, torchs in zip(times["ours"], times["torch"], strict=True))
            print(
                f"{num_ranks} ranks, {size_kib:>6} KiB: torch {wall['torch'] * 1e3:7.2f} ms ({cpu['torch'] * 1e3:6.2f} CPU), "
                f"ours {wall['ours'] * 1e3:7.2f} ms ({cpu['ours'] * 1e3:6.2f} CPU), ratio {paired:.2f}",
                flush=True,
            )
    communicator.close()
    dist.barrier()
    dist.destroy_process_group()
