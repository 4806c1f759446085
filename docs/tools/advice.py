"""Print the table of ``docs/advice.md``: what the planner advises for each preset, on several links.

``python -m docs.tools.advice`` prints the rows; a test compares them with those of the page.
"""

from __future__ import annotations

from typing import Final

from megabucket.planning import load_config
from megabucket.planning.setting import Outlook, outlook_of, setting_of
from megabucket.units import format_seconds

MODELS: Final = (
    "gpt2-124m",
    "gpt2-355m",
    "gpt2-774m",
    "gpt2-1.5b",
    "gpt3-6.7b",
    "gpt3-175b",
    "smollm2-360m",
    "llama3.2-1b",
    "llama2-7b",
    "llama3-8b",
    "llama3-70b",
    "qwen2.5-7b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "deepseek-v3",
)
LINKS: Final = (("h100-cluster-400g", 64), ("infiniband-400g", 64), ("ethernet-25g", 8))
"""Link and ranks."""

HEAD: Final = """\
| preset | link, ranks | advice | buckets | step | saves | over the best | over the bound |
|---|---|---|---|---|---|---|---|"""


def outlook(model: str, link: str, num_ranks: int) -> Outlook:
    """Return the figures of a preset on a link."""
    return outlook_of(setting_of(load_config(model, [f"link={link}"]), dp_size=num_ranks), has_scaling=False)


def row(model: str, link: str, num_ranks: int) -> str:
    """Return the row of a preset on a link."""
    found = outlook(model, link, num_ranks)
    advice = found.advice
    what, change = "keep", f"{advice.current.num_buckets:,}"
    if advice.offered is not None:
        ((field, value),) = [(name, value) for name, value in advice.offered.ddp.items() if value is not None] or [("", None)]
        what = f"`{field}: {value}`" if isinstance(value, int) else f"`{field}` of {len(value)} names" if value else "default"
        change += f" to {advice.offered.num_buckets:,}"
    saved = f"{format_seconds(advice.saved_s)}, {advice.saved_s / advice.current.step_s:.2%}" if advice.offered else "-"
    over_bound = advice.chosen.step_s / found.lower_bound_s - 1
    figures = (change, format_seconds(advice.chosen.step_s), saved, f"{advice.above_best:.2%}", f"{over_bound:.2%}")
    return f"| `{model}` | `{link}`, {num_ranks} | {' | '.join((what, *figures))} |"


def main() -> None:
    """Print the table."""
    print(HEAD)
    for model in MODELS:
        for link, num_ranks in LINKS:
            print(row(model, link, num_ranks), flush=True)


if __name__ == "__main__":
    main()
