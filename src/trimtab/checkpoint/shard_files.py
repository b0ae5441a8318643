"""Files of sharded tensors, written and read by torch's distributed checkpoint in safetensors format."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.core.errors import FormatError, SaveError

_PREFIX = "shard-"  # torch's file name prefix; other files in the folder are ignored
# Dtypes that round-trip: torch's writer accepts further types, but its reader returns them as other types.
_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_LIMIT = timedelta(minutes=30)  # maximum wait of the fastest rank for the slowest


def require_writable(tensors: Mapping[str, Tensor]) -> None:
    """Raise `FormatError` for a dtype that sharded files cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            known = ", ".join(sorted(str(each).removeprefix("torch.") for each in _TYPES))
            raise FormatError(
                name,
                got=str(tensor.dtype),
                expected=known,
                problem=f"{name} has dtype {tensor.dtype}, which sharded checkpoints cannot store.",
                hint=f"Use one of these dtypes: {known}.",
                code="shards.dtype_unsupported",
            )


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's shards. All ranks call this with the same folder.

    Raises:
        SaveError: Writing failed on this rank, or torch reports a failure of another rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = _writer_type()(str(folder), save_distributed=True)
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    try:
        # torch's copy to the CPU waits for the streams of the current device only.
        with torch.cuda.device(devices.pop()) if devices else contextlib.nullcontext():
            save(tensors, storage_writer=writer, process_group=_host_group(dist.group.WORLD))
    except CheckpointException as error:
        raise _not_written(folder, _reasons(error)) from None
    if writer.failure is not None:
        raise _not_written(folder, str(writer.failure)) from writer.failure


def stored_tensors(folder: Path) -> Mapping[str, Any]:
    """Return torch's metadata for each stored tensor, by name.

    Raises:
        FormatError: A file is not a valid sharded file.
    """
    try:
        found: Mapping[str, Any] = _reader_type()(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(folder, str(error)) from None
    return found


def read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read this rank's part of each tensor in place, without communication.

    Raises:
        FormatError: Reading failed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(tensors, storage_reader=_reader_type()(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise _unreadable(folder, _reasons(error)) from None


def _not_written(folder: Path, reason: str) -> SaveError:
    return SaveError(
        str(folder),
        got=reason,
        problem=f"The model's shards could not be written to {folder} ({reason}).",
        hint="Fix the cause and save again; earlier checkpoints are intact.",
    )


def _unreadable(folder: Path, reason: str) -> FormatError:
    return FormatError(
        str(folder),
        got=reason,
        problem=f"The model's shards in {folder} cannot be read ({reason}).",
        hint="Resume from another checkpoint, and update torch if this one passes `trimtab checkpoint verify`.",
        code="shards.unreadable",
    )


@functools.cache
def _host_group(job: Any) -> Any:
    """Return a Gloo group of all ranks, as planning a save needs no GPU. A collective call."""
    return dist.new_group(backend="gloo", timeout=_LIMIT)


@functools.cache
def _writer_type() -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.futures import Future

    class Writer(HuggingFaceStorageWriter):
        """Writer that stores an exception instead of raising: the other ranks wait for a result."""

        failure: Exception | None = None

        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception as error:
                self.failure = error
                none: Any = Future()
                none.set_result([])
                return none

    return Writer


@functools.cache
def _reader_type() -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Reader(HuggingFaceStorageReader):
        """Reader for sharded files only."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            shards: Any = _ShardFileSystem(self.fs)
            self.fs = shards

    return Reader


class _ShardFileSystem:
    """File system wrapper that lists only sharded files."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        """Return the sharded files of a folder."""
        return [each for each in self._files.ls(path) if Path(each).name.startswith(_PREFIX)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def _reasons(error: Any) -> str:
    """Return the failures by rank, as text."""
    said = (f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
    return "; ".join(said) or str(error)
