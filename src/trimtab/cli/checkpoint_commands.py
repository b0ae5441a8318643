"""Command `checkpoint verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import Json
from trimtab.cli.output import print_json, print_text

app = typer.Typer(help="Inspect the checkpoints of a run.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def checkpoint() -> None:
    """Inspect the checkpoints of a run."""


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="folder of a run, or a single checkpoint")],
    as_json: Json = False,
) -> None:
    """Verify all bytes of a run's checkpoints and list the results. Fails if a checkpoint is damaged or none exists."""
    from trimtab.checkpoint.atomic_directory import NAME, NAMED, committed_folders
    from trimtab.core.errors import FormatError

    is_one = (folder / NAME).is_file() or (folder.is_dir() and NAMED.fullmatch(folder.resolve().name))
    folders = [folder] if is_one else committed_folders(folder)
    if not folders:
        raise FormatError(
            str(folder),
            problem=f"{folder} contains no checkpoint.",
            hint="Pass the folder named by --checkpoints, or a single checkpoint in it.",
            code="checkpoint.missing",
        )
    rows = [_row(each) for each in folders]
    if as_json:
        print_json({"schema": 1, "name": "checkpoint_verify", "rows": rows})
    else:
        print_text("\n".join(f"{'ok' if row['is_whole'] else '--'}  {row['folder']:<14} {row['says']}" for row in rows))
    if not all(row["is_whole"] for row in rows):
        raise typer.Exit(1)


def _row(folder: Path) -> dict[str, Any]:
    from trimtab.checkpoint import atomic_directory
    from trimtab.core.errors import FormatError
    from trimtab.core.units import format_bytes

    try:
        found = atomic_directory.verify(folder)
        said = atomic_directory.run_metadata(folder, found)  # also validates the metadata, as resuming does
    except FormatError as error:
        return {"folder": folder.name, "is_whole": False, "code": error.code, "says": str(error)}
    row = {"folder": folder.name, "is_whole": True}
    size = sum(file.bytes for file in found.files.values())
    about = {"step": said.step, "rows": said.rows}
    says = f"{about['step']} steps, {about['rows']} samples; {len(found.files)} files, {format_bytes(size)}"
    return row | about | {"bytes": size, "says": says}
