"""The command line, read once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from peers.links import KINDS, LinkCase, link_cases
from peers.registry import NAMES

ROOT = Path(__file__).parents[3]
PARTS = ("steps", "memory", "hooks")
DEFAULT_MODELS = ("gpt", "tensors", "dominant", "moe")
MODEL_NAMES = (*DEFAULT_MODELS, "tiny")
HOOK_MODELS = ("tensors", "sums-1500", "sums-20000")
HOOK_SYSTEMS = ("ddp", "megatron", "mb-ar", "mb-rs")


@dataclass(frozen=True)
class Options:
    """What to measure, how often, and where the result goes."""

    parts: tuple[str, ...]
    models: tuple[str, ...]
    systems: tuple[str, ...]
    links: tuple[LinkCase, ...]
    ranks: tuple[int, ...]
    hook_models: tuple[str, ...]
    turns: int
    steps: int
    warmups: int
    bucket_mib: float
    tolerance: float
    timeout_s: float
    name: str
    folder: Path

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * 2**20)


def read_options(arguments: list[str]) -> Options:
    """Return the options, or end the program with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="peers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--parts", default="steps,memory,hooks", help="of: " + ", ".join(PARTS))
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS), help="of: " + ", ".join(MODEL_NAMES))
    parser.add_argument("--systems", default=",".join(NAMES), help="of: " + ", ".join(NAMES))
    parser.add_argument("--links", default="loopback,timing", help="of: " + ", ".join(KINDS))
    parser.add_argument("--latencies", default="100", help="of the emulated fabric, microseconds")
    parser.add_argument("--bandwidths", default="0.5", help="of the emulated fabric, GB/s")
    parser.add_argument("--ranks", default="2", help="numbers of ranks, each a cell of its own")
    parser.add_argument("--hook-models", default=",".join(HOOK_MODELS), help="of: " + ", ".join(HOOK_MODELS))
    parser.add_argument("--turns", type=int, default=6, help="of each system in a cell")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn, after one that is not")
    parser.add_argument("--warmups", type=int, default=3, help="steps of each system before its first turn")
    parser.add_argument("--bucket-mib", type=float, default=25.0, help="of all systems that have buckets")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative difference of losses that is an error")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a cell may take")
    parser.add_argument("--name", default="bench", help="of the files that are written")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    given = parser.parse_args(arguments)

    def names(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name for name in text.split(",") if name))
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            parser.error(f"unknown {what}: {', '.join(unknown) or 'none given'}; there are {', '.join(known)}")
        return found

    kinds = names(given.links, KINDS, "links")
    systems = names(given.systems, NAMES, "systems")
    if min(given.turns, given.steps, given.warmups) < 1:
        parser.error("--turns, --steps and --warmups must be 1 or more")
    return Options(
        parts=names(given.parts, PARTS, "parts"),
        models=names(given.models, MODEL_NAMES, "models"),
        systems=systems,
        links=link_cases(list(kinds), _numbers(given.latencies), _numbers(given.bandwidths)),
        ranks=tuple(int(number) for number in given.ranks.split(",")),
        hook_models=names(given.hook_models, HOOK_MODELS, "models for hooks"),
        turns=given.turns,
        steps=given.steps,
        warmups=given.warmups,
        bucket_mib=given.bucket_mib,
        tolerance=given.tolerance,
        timeout_s=given.timeout,
        name=given.name,
        folder=given.folder,
    )


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]
