"""Files of shards: torch's distributed checkpoint, by its writer and reader of safetensors."""

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

_PREFIX = "shard-"  # as torch names them; others of a folder are not read
# Types that torch's writer and reader both know; of any other it would write what it reads as another.
_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_LIMIT = timedelta(minutes=30)  # that the slowest rank may write for longer than the fastest


def require_writable(tensors: Mapping[str, Tensor]) -> None:
    """Raise `FormatError` for a type that files of shards cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            raise FormatError(name, given=str(tensor.dtype), expected="real numbers of a type that safetensors knows")


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write them; every rank calls it, with the same folder and what is its own.

    Raises:
        SaveError: this rank could not write, or torch says that another could not.
    """
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.api import CheckpointException

    writer = _writer_type()(str(folder), save_distributed=True)
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    try:
        # What copies to the host waits for the streams of the current device.
        with torch.cuda.device(devices.pop()) if devices else contextlib.nullcontext():
            save(tensors, storage_writer=writer, process_group=_host_group(dist.group.WORLD))
    except CheckpointException as error:
        raise SaveError(str(folder), given=_reasons(error), expected="a disk that takes it") from None
    if writer.failure is not None:
        raise SaveError(str(folder), given=str(writer.failure), expected="a disk that takes it") from writer.failure


def written(folder: Path) -> Mapping[str, Any]:
    """Return by its name what is known of each tensor that was written.

    Raises:
        FormatError: a file is none of shards.
    """
    try:
        return _reader_type()(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise FormatError(str(folder), given=f"what cannot be read ({error})", expected="files of shards") from None


def read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read into tensors that are there, this rank's part of each; it asks no other.

    Raises:
        FormatError: it cannot be read.
    """
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(tensors, storage_reader=_reader_type()(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise FormatError(str(folder), given=_reasons(error), expected="files of shards") from None


@functools.cache
def _host_group(job: Any) -> Any:
    """Return a group of all ranks that talk over the host: planning needs no device. All make it at once."""
    return dist.new_group(backend="gloo", timeout=_LIMIT)


@functools.cache
def _writer_type() -> Any:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.futures import Future

    class Writer(HuggingFaceStorageWriter):
        """Keeps what it failed with: the others are waiting for what it has written, and must not wait in vain."""

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
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    class Reader(HuggingFaceStorageReader):
        """Looks at files of shards alone."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.fs = _Shards(self.fs)

    return Reader


class _Shards:
    """A file system that shows no other files."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        """Return the files of shards in a folder."""
        return [each for each in self._files.ls(path) if Path(each).name.startswith(_PREFIX)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def _reasons(error: Any) -> str:
    """Return what failed on which rank."""
    said = (f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
    return "; ".join(said) or str(error)
