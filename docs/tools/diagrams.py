"""Draw the pictures of the documentation from what the package computes.

``python -m docs.tools.diagrams`` writes ``docs/_static/*.svg``; a test compares the committed pictures with the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megabucket import DistributedDataParallelConfig, ParamSpec, build_layout
from megabucket.planning.cuts import uniform_plan
from megabucket.planning.links import RingLink
from megabucket.planning.simulate import Mode, simulate_steps
from megabucket.planning.workload import TensorWork, Workload
from megabucket.trace import Lane, StepTrace

FOLDER = Path(__file__).parents[1] / "_static"
WIDTH = 860
_LEFT, _RIGHT = 110, 12  # margins of the drawing area; names are in the left one
_STYLE = """
svg { background: #ffffff }
text { font: 12px system-ui, sans-serif; fill: #1f2933 }
.small { font-size: 10.5px } .title { font-weight: 600 } .middle { text-anchor: middle }
.forward { fill: #9fb3c8 } .backward { fill: #627d98 } .comm { fill: #f0a202 } .wait { fill: #e12d39 }
.param { fill: #9fb3c8; stroke: #334e68 } .padding { fill: #e4e7eb; stroke: #9aa5b1 } .shard { fill: none; stroke: #d64545 }
.bucket { fill: none; stroke: #f0a202; stroke-width: 2 } .line { stroke: #7b8794; fill: none }
@media (prefers-color-scheme: dark) {
  svg { background: #131416 } text { fill: #e4e7eb } .padding { fill: #323f4b }
  .param, .forward { fill: #486581 }
}
"""


def svg(height: float, parts: Sequence[str], description: str) -> str:
    """Return a whole picture."""
    size = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(description)}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def box(start: float, top: float, stop: float, height: float, kind: str, title: str = "") -> str:
    """Return a rectangle with a tooltip."""
    shown = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{kind}" x="{start:.1f}" y="{top:.1f}" width="{stop - start:.1f}" height="{height:.1f}">{shown}</rect>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def small(x: float, y: float, words: str) -> str:
    """Return a line of small text."""
    return text(x, y, words, "small")


def label(x: float, y: float, words: str) -> str:
    """Return a line of small text with its middle at ``x``."""
    return text(x, y, words, "small middle")


def draw_layout() -> str:
    """Draw the buffer of a small model: parameters, gaps, buckets, shards of three ranks."""
    specs = [
        ParamSpec("embed.weight", (20, 16)),
        ParamSpec("fc1.weight", (40, 16)),
        ParamSpec("fc1.bias", (40,)),
        ParamSpec("fc2.weight", (16, 40)),
        ParamSpec("fc2.bias", (16,)),
    ]
    num_ranks = 3
    layout = build_layout(specs, DistributedDataParallelConfig(bucket_size=700), dp_size=num_ranks)
    (buffer,) = layout.buffers
    stop_numel = buffer.buckets[-1].stop
    scale = (WIDTH - _LEFT - _RIGHT) / stop_numel

    def x(numel: float) -> float:
        return _LEFT + numel * scale

    parts = [text(4, 44, "parameters", "title"), text(4, 94, "buckets", "title"), text(4, 140, "shards", "title")]
    parts.append(box(x(0), 24, x(stop_numel), 30, "padding", "padding"))
    for name, slot in buffer.params.items():
        parts.append(box(x(slot.start), 24, x(slot.stop), 30, "param", f"{name}: elements {slot.start} to {slot.stop}"))
        if (slot.stop - slot.start) * scale > 7 * len(name):
            parts.append(label(x((slot.start + slot.stop) / 2), 43, name))
    for number, bucket in enumerate(buffer.buckets):
        parts.append(box(x(bucket.start) + 1, 74, x(bucket.stop) - 1, 30, "bucket"))
        parts.append(label(x((bucket.start + bucket.stop) / 2), 93, f"bucket {number}: {bucket.stop - bucket.start}"))
        shard_numel = (bucket.stop - bucket.start) / num_ranks
        for rank in range(num_ranks):
            start = bucket.start + rank * shard_numel
            parts.append(box(x(start) + 1, 122, x(start + shard_numel) - 1, 26, "shard"))
            parts.append(label(x(start + shard_numel / 2), 139, f"rank {rank}"))
    parts.append(
        text(
            x(0),
            172,
            "One buffer, first gradient first. Gray is padding: parameters start at multiples of 64 elements,",
            "small",
        )
    )
    parts.append(small(x(0), 187, "buckets end at multiples of lcm(ranks, 128), so that each is cut into equal shards."))
    return svg(196, parts, "A buffer with five parameters, cut into buckets, each cut into three shards")


def draw_overlap() -> str:
    """Draw a step of a model of eight blocks on 16 ranks, as simulated: one bucket, and eight."""
    workload = Workload(tuple(TensorWork(f"block{i}", 8_000_000, backward_s=3e-3, forward_s=1.5e-3) for i in range(8)))
    link, num_ranks = RingLink(latency_s=20e-6, bytes_per_s=24e9), 16
    traces = {}
    for bucket_numel in (64_000_000, 8_000_000):
        plan = uniform_plan(workload, bucket_numel)
        steps = simulate_steps(workload, plan, link, num_ranks=num_ranks, mode=Mode.REDUCE_SCATTER, overlap_param_gather=True)
        traces["1 bucket" if len(plan.buckets) == 1 else f"{len(plan.buckets)} buckets"] = steps[-1]
    longest_s = max(trace.duration_s for trace in traces.values())
    parts = [
        part
        for number, (name, trace) in enumerate(traces.items())
        for part in _draw_step(name, trace, top=10 + 100 * number, pixels_per_s=(WIDTH - _LEFT - _RIGHT - 30) / longest_s)
    ]
    keys = {"forward": "forward", "backward": "backward", "comm": "gather or reduce-scatter", "wait": "waits for the network"}
    for number, (kind, words) in enumerate(keys.items()):
        parts += [
            box(_LEFT + 170 * number, 206, _LEFT + 170 * number + 14, 12, kind),
            small(_LEFT + 170 * number + 20, 216, words),
        ]
    return svg(226, parts, "One step with one bucket and with eight: with eight most communication is hidden")


def _draw_step(name: str, trace: StepTrace, *, top: float, pixels_per_s: float) -> list[str]:
    rows: Mapping[Lane, float] = {Lane.COMPUTE: top + 22, Lane.WAIT: top + 22, Lane.COMM: top + 52}
    summary = f"{1e3 * trace.duration_s:.1f} ms a step, {1e3 * trace.exposed_s:.1f} ms of it waiting"
    parts = [text(4, top + 12, name, "title"), small(_LEFT, top + 12, summary)]
    parts += [small(4, top + 38, "compute"), small(4, top + 68, "network")]
    for interval in trace.intervals:
        start, stop = ((moment - trace.start_s) * pixels_per_s + _LEFT for moment in (interval.start_s, interval.stop_s))
        kind = interval.label if interval.lane is Lane.COMPUTE else interval.lane.value
        parts.append(
            box(
                start + 0.5,
                rows[interval.lane],
                max(stop - 0.5, start + 1),
                24,
                kind,
                f"{interval.lane.value}: {interval.label}",
            )
        )
        number = interval.label.split()[-1]
        if interval.lane is Lane.COMM and stop - start > 20 and number.isdigit():
            parts.append(label((start + stop) / 2, rows[interval.lane] + 16, number))
    return parts


PICTURES = {"buffer.svg": draw_layout, "overlap.svg": draw_overlap}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
