"""``megabucket checkpoint``: look into checkpoints, verify, compare and rewrite them, without a training run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megabucket.cli.exit_codes import ExitCode, reports_errors
from megabucket.cli.output import notice_when_slow, print_answer, text_table
from megabucket.cli.workload import ConfigFile, WorkloadName, open_workload
from megabucket.errors import CheckpointError, ConfigError, printable
from megabucket.units import MIB, format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megabucket.checkpoint.offline import Comparison
    from megabucket.checkpoint.stored import StoredCheckpoint

app = typer.Typer(help="Inspect, verify, compare and rewrite checkpoints.", no_args_is_help=True, rich_markup_mode=None)

_SHOWN = 20


_Path = Annotated[Path, typer.Argument(help="a run's directory of checkpoints, or one checkpoint in it")]
_Step = Annotated[int | None, typer.Option(min=0, help="this step; otherwise the one that 'latest' names")]
_Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON on stdout")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the step, or the weights, that are there already")]


@app.command()
@reports_errors
def inspect(path: _Path, step: _Step = None, json: _Json = False) -> None:
    """Print the contents of a checkpoint, from its manifest alone; data files are not read."""
    from megabucket.checkpoint.format import manifest_fields

    stored = _open(path, step)
    data = {"path": str(stored.path), "seal": stored.seal, **manifest_fields(stored.manifest)}
    print_answer(data, _lines(stored), as_json=json)


@app.command()
@reports_errors
def verify(path: _Path, step: _Step = None, json: _Json = False) -> None:
    """Read every file of a checkpoint and compare it with its SHA-256; name each that is damaged."""
    stored = _open(path, step)
    total_bytes = sum(file.num_bytes for file in stored.files)
    with notice_when_slow(f"reading {len(stored.files)} files, {format_bytes(total_bytes)}"):
        problems = [f"{error.file}: {error.problem}" for error in stored.damage()]
    answer = {"path": str(stored.path), "step": stored.step, "files": len(stored.files), "bytes": total_bytes}
    found = f"{len(problems)} of {len(stored.files)} files are not what was written" if problems else "every file is right"
    summary = f"{stored.path}: step {stored.step}, {len(stored.files)} files, {format_bytes(total_bytes)}: {found}"
    print_answer({**answer, "problems": problems}, [summary, *problems], as_json=json)
    if problems:
        raise typer.Exit(ExitCode.CHECKPOINT)


@app.command()
@reports_errors
def diff(
    first: _Path,
    second: _Path,
    step: Annotated[int | None, typer.Option(min=0, help="this step of the first")] = None,
    other_step: Annotated[int | None, typer.Option(min=0, help="this step of the second; otherwise as of the first")] = None,
    json: _Json = False,
) -> None:
    """Compare two checkpoints bit by bit, however many ranks wrote them; exit with 1 when they differ."""
    from megabucket.checkpoint.offline import compare

    with notice_when_slow("comparing the checkpoints"):
        found = compare(_open(first, step), _open(second, step if other_step is None else other_step))
    print_answer(asdict(found), _difference_lines(found), as_json=json)
    if not found.is_equal:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
@reports_errors
def reshard(
    path: _Path,
    out: Annotated[Path, typer.Argument(help="the directory to write the checkpoint into")],
    ranks: Annotated[int, typer.Option(min=1, max=100_000, help="write it as this many ranks would")],
    step: _Step = None,
    max_file_mib: Annotated[int, typer.Option(min=1, max=4096, help="size of a file at most")] = 64,
    overwrite: _Overwrite = False,
    json: _Json = False,
) -> None:
    """Write a checkpoint again for another number of ranks. Any number can load any; this saves reading."""
    from megabucket.checkpoint.offline import reshard as run
    from megabucket.checkpoint.save import SaveSettings

    settings = SaveSettings(keep_last=None, max_file_bytes=max_file_mib * MIB, overwrite=overwrite)
    with notice_when_slow(f"writing the checkpoint for {ranks} ranks"):
        written = run(_open(path, step), out, num_writers=ranks, settings=settings)
    _print_written([written], json=json)


@app.command()
@reports_errors
def convert(
    source: Annotated[Path, typer.Argument(help="a checkpoint, or with --to megabucket a file or directory of weights")],
    out: Annotated[Path, typer.Argument(help="the directory to write into")],
    to: Annotated[
        Literal["safetensors", "megabucket"],
        typer.Option(help="weights as safetensors files that transformers loads, or from such files"),
    ],
    step: Annotated[int | None, typer.Option(min=0, help="the step to read; with --to megabucket the one to write (0)")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="convert floating-point weights; only with --to safetensors"),
    ] = None,
    overwrite: _Overwrite = False,
    json: _Json = False,
) -> None:
    """Convert the weights of a checkpoint to safetensors files as Hugging Face has them, or the other way round."""
    if to == "safetensors":
        import torch

        from megabucket.checkpoint.convert.huggingface import export_weights

        if not overwrite and any(out.glob("*.safetensors")):
            raise CheckpointError(f"{out}: there are weights already; give another directory, or --overwrite to replace them")
        wanted = None if dtype is None else getattr(torch, dtype)
        with notice_when_slow("writing the weights"):
            written = export_weights(_open(source, step), out, dtype=wanted)
        _print_written(written, json=json)
        return
    if dtype is not None:
        raise ConfigError("--dtype is for --to safetensors; a checkpoint keeps its dtypes, and loads with cast=True")
    from megabucket.checkpoint.convert.huggingface import import_weights
    from megabucket.checkpoint.save import SaveSettings

    settings = SaveSettings(keep_last=None, overwrite=overwrite)
    with notice_when_slow("writing the checkpoint"):
        checkpoint = import_weights(source, out, step=step or 0, settings=settings)
    _print_written([checkpoint], json=json)


@app.command(name="can-load")
@reports_errors
def can_load(
    path: _Path,
    workload: WorkloadName,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example mode=all_reduce")] = None,
    config: ConfigFile = None,
    step: _Step = None,
    cast: Annotated[bool, typer.Option(help="floating-point tensors may be converted")] = False,
    json: _Json = False,
) -> None:
    """Name everything that keeps a training program from loading a checkpoint; nothing is read or changed."""
    from megabucket.measure.program import load_problems

    function, run = open_workload(workload, config, overrides)
    stored = _open(path, step)
    with notice_when_slow("comparing the program with the checkpoint"):
        problems = load_problems(function, run, stored, cast=cast)
    outcome = f"{len(problems)} things do not fit" if problems else "everything fits"
    lines = [f"{stored.path}: step {stored.step}, {len(stored.tensors)} tensors: {outcome}"]
    lines += [printable(problem, 300) for problem in problems]
    print_answer({"path": str(stored.path), "step": stored.step, "problems": problems}, lines, as_json=json)
    if problems:
        raise typer.Exit(ExitCode.CHECKPOINT)


def _open(path: Path, step: int | None) -> StoredCheckpoint:
    from megabucket.checkpoint.stored import open_at

    return open_at(path, step)


def _print_written(paths: Sequence[Path], *, json: bool) -> None:
    written = list(map(str, paths))
    print_answer({"written": written}, written, as_json=json)


def _lines(stored: StoredCheckpoint) -> Iterator[str]:
    from megabucket.checkpoint.format import ITEM_BYTES

    total_bytes = sum(file.num_bytes for file in stored.files)
    yield f"{stored.path}: step {stored.step}, written by {stored.world_size} ranks"
    yield f"{len(stored.files)} files, {format_bytes(total_bytes)}; {len(stored.tensors)} tensors"
    yield ""
    # Of a model that is parallel in other ways than by data, also its groups, and how many blocks tensors were cut into.
    is_parallel = any(len(tensor.blocks) > 1 or tensor.group != "dense" for tensor in stored.manifest.tensors.values())
    rows = [["tensor", "dtype", "shape", "elements", "bytes", "pieces", *(["blocks", "group"] if is_parallel else [])]]
    for name, info in stored.tensors.items():
        size = format_bytes(info.numel * ITEM_BYTES[info.dtype])
        shape = "x".join(map(str, info.shape)) or "scalar"
        blocks = stored.manifest.tensors[name].blocks
        pieces = str(sum(len(block.pieces) for block in blocks))
        more = [str(len(blocks)), printable(info.group, 20)] if is_parallel else []
        rows.append([printable(name, 60), info.dtype, shape, format_count(info.numel), size, pieces, *more])
    yield from text_table(rows, num_left=3)
    yield ""
    for name, value in stored.values.items():
        yield f"{printable(name, 60)}: {printable(repr(value), 200)}"


def _difference_lines(found: Comparison) -> Iterator[str]:
    yield (
        f"{found.num_equal_tensors} tensors are equal bit for bit, {len({one.name for one in found.tensors})} differ; "
        f"{len(found.values)} other values differ"
    )
    for what, differences in (("tensor", found.tensors), ("value", found.values)):
        for difference in differences[:_SHOWN]:
            yield f"{what} {printable(difference.name)}: {printable(difference.what, 300)}"
        if len(differences) > _SHOWN:
            yield f"and {len(differences) - _SHOWN} more {what}s"
