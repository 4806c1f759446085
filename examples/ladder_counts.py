"""Six ways to synchronize gradients, from the simplest to torch's DDP: how many collectives each issues. No torch.

python examples/ladder_counts.py                       # smollm2-360m
python examples/ladder_counts.py -c configs/bytegpt.yaml

The ladder of many introductions to data parallelism. Counts follow from the sizes of the tensors alone; ``ladder.py`` runs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megabucket.errors import ConfigError
from megabucket.planning.architecture import param_specs
from megabucket.planning.run_config import load_config
from megabucket.planning.workload import wire_bytes
from megabucket.units import MIB

BUCKET_CAP_BYTES: Final = 25 * MIB
"""``bucket_cap_mb=25``, the default of torch's DDP."""

FIRST_BUCKET_BYTES: Final = MIB
"""What torch's DDP closes its first bucket at, so that communication begins early (``dist._DEFAULT_FIRST_BUCKET_BYTES``). Not
where ``bucket_cap_mb`` is given: that holds for the first one, too."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One strategy in numbers."""

    strategy: str
    collectives_per_sync: int
    """All-reduces of gradients each time they are synchronized."""
    syncs_per_step: int
    """Synchronizations in one optimizer step."""
    overlaps: bool
    """Whether backward goes on while a collective is under way."""

    @property
    def collectives_per_step(self) -> int:
        """All-reduces of gradients in one optimizer step."""
        return self.collectives_per_sync * self.syncs_per_step


def ladder(
    numels: Sequence[int],
    *,
    bytes_per_element: int = 4,
    num_microbatches: int = 2,
    bucket_cap_bytes: int | None = None,
) -> tuple[Rung, ...]:
    """Return the six strategies.

    Args:
        numels: elements of the trainable tensors in registration order, tied ones once.
        bytes_per_element: of a gradient.
        num_microbatches: backward passes in an optimizer step. Only the first and the last strategy synchronize each of them;
            torch's DDP would not, under ``no_sync()``.
        bucket_cap_bytes: a bucket is closed when it reaches this. ``None``: ``BUCKET_CAP_BYTES``, and for the first one of
            torch's DDP ``FIRST_BUCKET_BYTES``.

    Raises:
        ConfigError: no tensors.
    """
    if not numels:
        raise ConfigError("a ladder needs at least one tensor, got none")
    backwards = [numel * bytes_per_element for numel in reversed(numels)]
    num_tensors = len(backwards)
    cap_bytes = BUCKET_CAP_BYTES if bucket_cap_bytes is None else bucket_cap_bytes
    buckets = _num_buckets(backwards, (cap_bytes,))
    torch_buckets = _num_buckets(backwards, (FIRST_BUCKET_BYTES, cap_bytes)) if bucket_cap_bytes is None else buckets
    return (
        Rung("per tensor, after each backward", num_tensors, num_microbatches, overlaps=False),
        Rung("per tensor, after the last backward", num_tensors, 1, overlaps=False),
        Rung("per tensor, from hooks, blocking", num_tensors, 1, overlaps=False),
        Rung("per tensor, from hooks, asynchronous", num_tensors, 1, overlaps=True),
        Rung("buckets, asynchronous", buckets, 1, overlaps=True),
        Rung("torch DDP, each backward", torch_buckets, num_microbatches, overlaps=True),
    )


def _num_buckets(sizes_bytes: Sequence[int], caps_bytes: Sequence[int]) -> int:
    """Return how many buckets are closed at ``>=`` their cap; the last cap goes on."""
    count = filled = 0
    for index, size in enumerate(sizes_bytes):
        filled += size
        if filled >= caps_bytes[min(count, len(caps_bytes) - 1)] or index == len(sizes_bytes) - 1:
            count, filled = count + 1, 0
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", default="smollm2-360m", help="YAML file or preset with a model")
    parser.add_argument("--microbatches", type=int, default=2, help="backward passes in an optimizer step")
    arguments = parser.parse_args()
    run = load_config(arguments.config, [])
    if run.model is None:
        parser.error(f"{arguments.config} has no model section, so there is nothing to count")
    specs = param_specs(run.model)
    num_bytes, passes = wire_bytes(specs, run.ddp).gradient, arguments.microbatches
    print(f"{len(specs)} tensors, {num_bytes} bytes per element, {passes} backwards per step\n")
    print(f"{'strategy':<36}  per sync  syncs  per step  overlaps")
    for rung in ladder([spec.numel for spec in specs], bytes_per_element=num_bytes, num_microbatches=passes):
        counts = f"{rung.collectives_per_sync:>8,}  {rung.syncs_per_step:>5}  {rung.collectives_per_step:>8,}"
        print(f"{rung.strategy:<36}  {counts}  {'yes' if rung.overlaps else 'no':>8}")


if __name__ == "__main__":
    main()
