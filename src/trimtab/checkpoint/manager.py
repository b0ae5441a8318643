"""Checkpoint manager: saves a run at intervals, resumes after an interruption, and stops on a signal.

Every rank of a run has a manager: rank 0 searches for checkpoints and commits them, and each rank reads and writes its
own files. The folder must be on a file system shared by all ranks. A single process is the case of one rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trimtab.checkpoint import atomic_directory, batch_size_log
from trimtab.checkpoint.atomic_directory import (
    RunMetadata,
    commit_name,
    delete_old_folders,
    newest_good,
    prefix_of,
    put_aside,
    run_metadata,
)
from trimtab.checkpoint.batch_size_log import BatchSizeLog
from trimtab.checkpoint.config import (
    MUST_MATCH,
    Checkpoints,
    changes,
    device_of,
    require_accepted,
    require_supported,
    world_of,
)
from trimtab.checkpoint.run_lock import RunLock, lock_run_folder
from trimtab.checkpoint.signals import Signals
from trimtab.checkpoint.state_files import (
    Packer,
    StateFiles,
    digest_of,
    read_state,
    safetensors_library,
    snapshot,
    write_state,
)
from trimtab.checkpoint.train_state import (
    AdditionalState,
    ModelState,
    OptimizerState,
    ShardedState,
    WithoutParameters,
    merge_shards,
    write_shards,
)
from trimtab.core.errors import (
    DamagedError,
    FormatError,
    LoopError,
    RankError,
    SaveError,
    TrimtabError,
    ValueGivenError,
)
from trimtab.core.files import TEMPORARY
from trimtab.core.serialization import from_jsonable, quoted, to_jsonable, unquoted
from trimtab.core.stateful import Load, loading_parts
from trimtab.core.stopping_rule import StopReason
from trimtab.distributed.launch import ENDED
from trimtab.distributed.process_group import from_first, limited_to, time_limit_s, words_at_work
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.measure.gradient_norms import is_sharded
from trimtab.plans.plan import Plan
from trimtab.state.random_state import derived_random_state
from trimtab.training.hooks import WindowDecision
from trimtab.training.metadata_exchange import MetadataExchange
from trimtab.training.run import Run
from trimtab.training.user_hooks import require_saved

T = TypeVar("T")

_OF_EACH = ("data", "record", "also", "shards")  # parts of a run's state written by every rank, in addition to buffers
_LOOKS = 8  # minimum clock checks per save interval, in addition to the early ones


class RankCommunication:
    """Communication between the ranks of a run, and their common files; a single process is the case of one rank.

    Attributes:
        rank: Rank of this process. Rank 0 searches for checkpoints and commits them.
        num: Number of ranks.
    """

    _asked = itertools.count()  # number of exchanges so far; equal on every rank

    def __init__(self, exchange: MetadataExchange) -> None:
        self.num = exchange.num_ranks
        self.rank = torch.distributed.get_rank() if self.num > 1 else 0
        # Read now: the time limit applies only while the run starts, and a trainer may have set a longer one.
        self._limit_s = time_limit_s()

    def first(self, make: Callable[[], str], about: str) -> str:
        """Return the result of `make` on rank 0; an error on rank 0 is raised on all ranks.

        Args:
            about: Topic of the exchange, used as a key: ranks that are out of step wait instead of mixing up results.
        """
        if self.num == 1:
            return make()
        with limited_to(self._limit_s):
            return from_first(make, self._topic(about))

    def each(self, make: Callable[[], str], about: str) -> list[str]:
        """Return the results of `make` on every rank, ordered by rank; waits for the slowest rank that is alive."""
        if self.num == 1:
            return [make()]
        with limited_to(self._limit_s):
            return words_at_work(make, self._topic(about))

    def _topic(self, about: str) -> str:
        return f"kept/{next(RankCommunication._asked)}/{about}"

    def together(self, make: Callable[[], T], about: str) -> T:
        """Call `make` on every rank, wait for all ranks, and return the local result.

        There is no time limit for a rank that is alive. An error of the local `make` is raised unchanged.

        Raises:
            RankError: A rank shows no sign of life.
            FormatError: `make` failed on another rank.
        """
        if self.num == 1:
            return make()
        made, failure = list[T](), list[Exception]()

        def tried() -> str:
            try:
                made.append(make())
            except Exception as error:
                failure.append(error)
                return f"{type(error).__name__}: {error}"
            return ""

        said = self.each(tried, about)
        if failure:
            raise failure[0]
        for rank, word in enumerate(said):
            if word:
                raise FormatError(
                    f"rank {rank}",
                    got=word,
                    problem=f"Rank {rank} failed ({word}).",
                    hint=f"Fix the error of rank {rank}; the other ranks stopped because of it.",
                    code=ENDED,
                )
        return made[0]

    def require_one_epoch(self, epoch: int) -> None:
        """Raise `LoopError` on all ranks if a checkpoint is saved in different epochs."""
        found = self.each(lambda: str(epoch), "checkpoint")
        if len(set(found)) > 1:
            listed = ", ".join(f"epoch {each} on rank {rank}" for rank, each in enumerate(found))
            raise LoopError(
                "checkpoint",
                got=listed,
                expected="the same epoch on all ranks",
                problem=f"The checkpoint was requested in different epochs: {listed}.",
                hint="Leave the loop over run.windows() at the same step on all ranks and keep no reference to its "
                "iterator, or call run.interrupt() to end the loop early.",
                code="checkpoint.epochs_differ",
            )

    def write(
        self,
        final: Path,
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        shards: Callable[[Path], None] | None = None,
    ) -> None:
        """Commit a checkpoint with the state of every rank. After an error nothing was committed.

        Args:
            about: Manifest metadata.
            shards: Writes the sharded tensors into the folder; called on all ranks at the same time.

        Raises:
            SaveError, FormatError: A rank could not write. Raised on all ranks.
            RankError: A rank was lost.
        """
        with contextlib.ExitStack() as stack:

            def begin() -> str:
                return "" if self.rank else quoted(stack.enter_context(atomic_directory.writing(final, about)))

            where = self.together(begin, f"{final.name}/begun")
            folder = unquoted(self.first(lambda: where, f"{final.name}/where"))
            if TEMPORARY not in folder.name:
                raise RankError(
                    "rank 0",
                    got=repr(str(folder)),
                    problem=f"Rank 0 sent {str(folder)!r} instead of the path of the temporary checkpoint folder.",
                    hint="Run the same version of trimtab on all ranks.",
                    code="ranks.unexpected_message",
                )
            own = self._without_duplicates(state, final.name)
            write = partial(write_state, folder, own, prefix_of(self.rank))
            self.together(partial(_saved, write), f"{final.name}/state")
            if shards is not None:  # after all states: no rank may wait in torch for a rank that failed before
                self.together(partial(_saved, partial(shards, folder)), f"{final.name}/shards")
            self.together(stack.close, f"{final.name}/commit")  # rank 0 commits; the other ranks have nothing to close

    def _without_duplicates(self, state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Drop the user's additional state from this rank's files if rank 0 writes an identical copy."""
        # An average of the weights is as large as the model and usually identical on every rank.
        if self.num == 1:
            return state

        def mark() -> str:
            try:
                return digest_of(state.get("also"))
            except Exception:  # raised again, and shared with the other ranks, when the state is written
                return f"of rank {self.rank} alone"

        said = self.each(mark, f"{name}/also")
        is_alike = self.rank > 0 and said[self.rank] == said[0]
        return {part: each for part, each in state.items() if part != "also"} if is_alike else state

    def read(self, folder: Path, saved: int, files: StateFiles | None = None) -> dict[str, Any]:
        """Return this rank's state from a checkpoint.

        A rank beyond the saved ranks uses the files of rank `self.rank % saved`, with newly derived global random
        states. The random states from the start of the epoch are kept, because they determine the sample order. Such a
        rank starts a new record and uses rank 0's copy of the user's additional state.

        Args:
            saved: Number of ranks that wrote the checkpoint.
            files: Contents of rank 0's files if they were read during verification.
        """
        state: dict[str, Any] = read_state(folder, files=files)
        of = self.rank % saved
        if of:
            own = read_state(folder, prefix_of(of))
            # Older checkpoints have no record per rank, and only rank 0's copy of the user's additional state.
            state |= {"data": own["data"], "record": own.get("record")}
            if "also" in own and self.rank < saved:
                state["also"] = own["also"]
            state["model"]["own"] |= own["buffers"]["own"]
            # The number of non-persistent buffers can differ between ranks.
            state["model"]["hidden"] = own["buffers"]["hidden"]
        if "shards" in state:
            state["shards"] = merge_shards(
                read_state(folder, prefix_of(each))["shards"] if each else state["shards"] for each in range(saved)
            )
        if self.rank >= saved:
            state["record"] = None
            here = state["data"]["here"]
            here["random"] = derived_random_state(here["random"], self.rank)
        return state


def _saved(write: Callable[[], object]) -> None:
    """Call `write` and convert unexpected exceptions to `SaveError`."""
    try:
        write()
    except TrimtabError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise SaveError(
            "checkpoint",
            got=reason,
            problem=f"The checkpoint could not be written ({reason}).",
            hint="Fix the cause and save again; earlier checkpoints are intact.",
        ) from error


class AsyncSaver:
    """Worker thread for one save at a time, of copies of the state. A failure is always raised or warned about."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Wait for the previous save, then start the next. If the previous save failed, raise the error instead."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="trimtab-checkpoint")
        self._under_way = self._pool.submit(write)

    def wait(self) -> None:
        """Wait for the save in progress. An error of the save is raised once."""
        under_way = self._under_way
        if under_way is None:
            return
        try:
            under_way.result()
        finally:
            if under_way.done():  # a signal may have ended the wait but not the save
                self._under_way = None

    def end(self) -> None:
        """End the thread after the save in progress. A later `wait` still raises an error of the save."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __del__(self) -> None:
        under_way = self._under_way
        if under_way is not None and under_way.done() and (error := under_way.exception()) is not None:
            message = f"A background save failed, and the run was never closed to raise the error: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=1)


class SaveInterval:
    """Save interval in windows or seconds since the last save.

    With several ranks, rank 0's clock decides. Asking rank 0 costs an exchange, so the ranks ask after 1, 2, 4, ...
    windows, and at least every eighth of `every_s` by the current speed, because windows may become slower.
    """

    def __init__(self, settings: Checkpoints, ranks: RankCommunication) -> None:
        self._settings, self._ranks = settings, ranks
        self.begun(0)

    def begun(self, windows: int) -> None:
        """Restart the interval at `windows`."""
        self._windows, self._since_s = windows, time.monotonic()
        self._asks_at, self._asked_at, self._asked_s = 1, 0, self._since_s

    def is_due(self, windows: int) -> bool:
        """Return True if the next save is due."""
        since, settings = windows - self._windows, self._settings
        if since <= 0:
            return False
        if settings.every_steps is not None and since >= settings.every_steps:
            return True
        if settings.every_s is None:
            return False
        if self._ranks.num == 1:
            return time.monotonic() - self._since_s >= settings.every_s
        if self._asks_at and since >= self._asks_at:
            every_s = settings.every_s
            self._asks_at = int(self._ranks.first(lambda: str(self._next(since, every_s)), f"pace/{windows}"))
        return not self._asks_at

    def _next(self, since: int, every_s: float) -> int:
        """Return the number of windows since the last save at which to check the clock again; 0 if the save is due."""
        now_s = time.monotonic()
        left_s = self._since_s + every_s - now_s
        if left_s <= 0:
            return 0
        window_s = max(now_s - self._asked_s, 1e-6) / (since - self._asked_at)
        self._asked_at, self._asked_s = since, now_s
        return since + max(1, min(since, math.ceil(min(left_s, every_s / _LOOKS) / window_s)))


class CheckpointManager:
    """Checkpoint manager of one run.

    Every rank creates the manager and calls all methods in the same order.

    Raises:
        FormatError: The folder cannot be used, or another run holds its lock.
        DependencyError: safetensors is not installed.
    """

    def __init__(
        self,
        settings: Checkpoints,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        ranks: RankCommunication,
        *,
        in_shards: bool,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        safetensors_library()
        self._settings, self._plan, self._ranks, self._in_shards = settings, plan, ranks, in_shards
        self._shards, self._model = ShardedState(model, optimizer), ModelState(model)
        # The state of the model and the optimizer, of a run whose ranks hold everything and of one in shards.
        self._parts: dict[str, Any] = {"model": self._model, "optimizer": OptimizerState(optimizer)}
        if modules:
            self._parts["modules"] = ModelState(nn.ModuleList(modules), "modules")
        self._parts_in_shards: dict[str, Any] = {"model": WithoutParameters(model), "shards": self._shards}
        self._also = AdditionalState(settings.also)
        # Step of the last save, which may still be under way, or of the resumed checkpoint; None after a failure.
        self._begun: int | None = None
        self._committed: int | None = None  # step of the last checkpoint, also if a later stage of the save failed
        self._accepted: Mapping[str, str] = {}  # accepted environment changes since the run began
        self._noted: Mapping[str, str] = {}  # environment changes that need no acceptance
        self._run: Run  # set by `attach`
        self._signals, self._background = Signals(), AsyncSaver()
        self._interval = SaveInterval(settings, ranks)
        self._lock: RunLock | None = None
        self._refused: list[tuple[Path, DamagedError]] = []
        self._files: StateFiles | None = None  # the verified state, until it is loaded
        try:
            said = json.loads(ranks.first(self._search, "found"))
            self._found = None if said is None else (unquoted(said[0]), from_jsonable(RunMetadata, said[1]))
            devices = ranks.each(lambda: device_of(model), "devices")
            threads = ranks.each(lambda: str(torch.get_num_threads()), "threads")
            self._world = world_of(model, optimizer, plan, devices, threads)
            ranks.together(self._require_world, "world")  # precedes sharding, which cannot be undone
            path = settings.path / batch_size_log.NAME
            self._journal = BatchSizeLog(path, self._world["plan"], writes=ranks.rank == 0)
            if settings.follows is not None:
                self._journal.follow(Path(settings.follows) / batch_size_log.NAME)
        except BaseException:
            self._release()
            raise

    def _search(self) -> str:
        """Lock the folder, and return path and metadata of the newest undamaged checkpoint as JSON. Only on rank 0."""
        settings = self._settings
        self._lock = lock_run_folder(settings.path)
        atomic_directory.delete_temporary_files(settings.path)
        settings.require_as_asked()
        if settings.resume == "never":
            (settings.path / batch_size_log.NAME).unlink(missing_ok=True)
            return "null"
        found = newest_good(settings.path, _contents)
        self._refused = found.refused
        if found.folder is not None and found.contents is not None:
            self._files, said = found.contents
            return json.dumps([quoted(found.folder), to_jsonable(said)])
        if found.refused:
            damages = " ".join(error.problem for _, error in found.refused)
            raise FormatError(
                str(settings.path),
                got=f"{len(found.refused)} damaged checkpoints",
                problem=f"All checkpoints in {settings.path} are damaged. {damages}",
                hint="Restore one of them from a copy, or start a new run in another folder.",
                code="checkpoint.all_damaged",
            )
        return "null"

    def _require_world(self) -> None:
        """Raise `ValueGivenError` if the checkpoint cannot be resumed in this environment."""
        if self._found is None:
            return
        _, said = self._found
        require_accepted(changes(said.world, self._world), self._settings.accepts)
        if self._in_shards and not said.in_shards:
            raise ValueGivenError(
                "resume: shards",
                problem="The checkpoint was saved with the whole model on each rank, but this run shards the model.",
                hint="Resume with zero_stage=0, or in one process.",
                code="resume.sharding_differs",
            )

    def _release(self) -> None:
        self._files = None
        if self._lock is not None:
            self._lock.release()

    def _state(self) -> dict[str, Any]:
        return {
            name: part.state_dict()
            for name, part in (self._parts_in_shards if self._in_shards else self._parts).items()
        }

    def attach(self, run: Run) -> None:
        """Start managing a run, and restore the newest undamaged checkpoint if one exists.

        Damaged newer checkpoints are renamed, with a warning.

        Raises:
            UsageError: The checkpoint does not fit the run. Run and model are unchanged.
        """
        self._run = run
        run.position.accepted = self._accept_data if "data" in self._settings.accepts else None
        if run.recorder is not None:
            run.recorder.on_failure = partial(self._handle_unwritten, "of the record")
        # Run the steps that can fail before any change.
        self._ranks.together(self._prepare, "prepared")
        if self._found is not None:
            self._resume(run, *self._found)
            self._begun = run.num_windows
        else:
            self._ranks.together(self._journal.begin, "begun")
        self._interval.begun(run.num_windows)
        self._signals.install()

    def _prepare(self) -> None:
        # Find unsupported types now, not at the first save.
        Packer(is_dry=True).pack(self._state() | {"also": self._also.early_state()})
        if self._found is None and self._run.recorder is not None:
            self._run.recorder.require_own()
        self._journal.prepare(0 if self._found is None else self._found[1].step)

    def _resume(self, run: Run, folder: Path, said: RunMetadata) -> None:
        reshaped_buffers: list[str] = []  # non-persistent buffers whose saved shape differs from the model's

        def read() -> Mapping[str, Load]:
            """Read the state of this rank and return the loading steps in order."""
            files, self._files = self._files, None
            state = self._ranks.read(folder, said.num_ranks, files)
            load_record, load_parts = self._loading(state, folder)
            reshaped_buffers.extend(self._model.reshaped_buffers(state["model"]))
            # Steps that can fail on a single rank come first: each runs on all ranks before the next one starts.
            return {
                "also": self._also.loading(state["also"]),
                "aside": partial(self._rename_damaged, folder),
                "record": load_record,
                "begun": self._journal.begin,
                "loaded": load_parts,
            }

        for name, load in self._ranks.together(read, "read").items():
            self._ranks.together(load, name)
        changed = {name: f"{then} -> {now}" for name, (then, now) in changes(said.world, self._world).items()}
        self._accepted = {**said.accepted, **{name: each for name, each in changed.items() if name in MUST_MATCH}}
        self._noted = {**said.noted, **{name: each for name, each in changed.items() if name not in MUST_MATCH}}
        detail: dict[str, Any] = {
            "from": folder.name,
            "changed": changed,
            "damaged": [error.problem for _, error in self._refused],
            "damaged_codes": [error.code for _, error in self._refused],
            "buffers": reshaped_buffers,
            "was_killed": self._lock is not None and self._lock.recovered is not None,
        }
        run.note("resumed", detail)

    def _accept_data(self, change: str) -> None:
        """Record that the run resumes with changed data."""
        self._accepted = {**self._accepted, "data": change}
        self._run.note("resumed_data", {"changed": {"data": change}})

    def _rename_damaged(self, folder: Path) -> None:
        for refused, error in self._refused:
            became = (
                "was renamed and no longer counts as a checkpoint"
                if put_aside(refused)
                else "was left as it is, because it is a link or not named step-N"
            )
            message = f"{error.problem} The damaged checkpoint {became}. The run resumes from {folder.name}."
            warnings.warn(message, stacklevel=6)

    def _loading(self, state: Mapping[str, Any], folder: Path) -> tuple[Load, Load]:
        """Return a function that restores the recorder, and one that restores the rest of the run."""
        run, load_record = self._run, _nothing
        if run.recorder is not None and state.get("record") is not None:
            load_record = run.recorder.loading(state["record"])
        elif run.recorder is not None:  # the saved run had no record, so a new record begins here
            run.recorder.require_own()
        cut = self._parts_in_shards | {"shards": self._shards.at(folder, run.stepped_by)}
        parts = (cut if "shards" in state else self._parts) | {"run": run, "data": run.position}
        rest = {name: each for name, each in state.items() if name not in ("also", "record")}
        return load_record, loading_parts(parts, rest)

    # Methods called by the run.

    def between(self) -> None:
        """Save if a save is due, and leave if a signal arrived. Called between windows.

        Raises:
            OSError, TrimtabError: A save failed and `on_failure` is "stop".
            KeyboardInterrupt, SystemExit: A signal arrived; the run has been saved.
        """
        if self._signals.came is not None:
            self._run.ask_to_end()
        leaves = self._run.stop_reason is StopReason.INTERRUPTED
        if leaves or self._interval.is_due(self._run.num_windows):
            self.save()
        if leaves:
            self._wait()
            self._signals.leave()

    def is_leaving(self) -> bool:
        """Return True after a signal."""
        return self._signals.came is not None

    def save(self) -> None:
        """Save the state, unless a checkpoint of this step exists; raises a failure if `on_failure` is "stop"."""
        windows = self._run.num_windows
        if windows in (self._begun, self._committed):
            return
        self._wait()
        self._begun = None
        self._interval.begun(windows)
        finite = self._is_finite(windows)
        with self._handle_failure(windows):
            state, tensors = self._ranks.together(self._own_state, f"taken/{windows}")
            self._ranks.require_one_epoch(state["data"]["passes"])
            write = self._writer_of(state, tensors, windows, finite=finite)
            self._background.begin(write) if self._settings.background else write()
            self._begun = windows
            self._interval.begun(windows)

    def _is_finite(self, windows: int) -> bool:
        """Return True if all parameters are finite on every rank."""
        found = self._ranks.each(lambda: nonfinite_parameter(self._run.model) or "", f"finite/{windows}")
        if name := next(filter(None, found), ""):
            self._run.report_nonfinite(f"NaN or infinity in parameter {name} after {windows} steps")
        return not name

    def _wait(self) -> None:
        """Wait for a save in the background."""
        with self._handle_failure(self._begun):
            self._background.wait()

    @contextlib.contextmanager
    def _handle_failure(self, windows: int | None) -> Iterator[None]:
        """Raise a save's error if `on_failure="stop"`, otherwise record the error and warn."""
        try:
            yield
        except RankError:  # a lost rank is no failed save
            raise
        except (OSError, TrimtabError) as error:
            if self._settings.on_failure == "stop":
                raise
            is_there = self._committed == windows
            code = error.code if isinstance(error, TrimtabError) else SaveError.default_code
            detail = {"windows": windows, "failed": str(error), "code": code, "is_saved": is_there}
            self._run.note("checkpoint", detail)
            if is_there:
                message = f"The checkpoint of step {windows} was saved, with an error afterwards: {error}"
            else:
                message = f"The checkpoint of step {windows} was not saved, and training continues: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    def _handle_unwritten(self, what: str, error: SaveError) -> None:
        """Raise or warn about lines that could not be written; they stay in memory for the next attempt."""
        if self._settings.on_failure == "stop":
            raise error
        message = f"Lines {what} could not be written and stay in memory until the next attempt: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=7)

    def _own_state(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Return the state that this rank writes, and the tensors of its shards (None for an unsharded run).

        Rank 0 writes everything. Other ranks write their buffers, data position with random states, record, additional
        user state and non-tensor optimizer state of their shards.
        """
        run = self._run
        state = self._state() | {"run": run.state_dict(), "data": run.position.state_dict()}
        state["also"] = self._also.state_dict()
        state["record"] = None if run.recorder is None else run.recorder.state_dict()
        self._journal.sync()
        if self._ranks.rank:
            state = {"buffers": self._model.buffers()} | {name: state[name] for name in _OF_EACH if name in state}
        return state, self._shards.tensors() if self._in_shards else None

    def _writer_of(
        self, state: Mapping[str, Any], tensors: dict[str, Tensor] | None, windows: int, *, finite: bool
    ) -> Callable[[], None]:
        """Return a function that writes the checkpoint."""
        settings = self._settings
        plan, samples = to_jsonable(self._plan), self._run.consumed_samples
        facts = (self._world, plan, self._in_shards, self._accepted, self._noted)
        about = to_jsonable(RunMetadata(windows, samples, *facts, finite=finite))
        taken, final = snapshot(state) if settings.background else state, settings.path / f"step-{windows}"
        shards = None if tensors is None else partial(write_shards, tensors=tensors)

        def retained() -> None:
            if self._ranks.rank == 0:
                commit_name(final)
                delete_old_folders(settings.path, settings.keep_last, final.name)

        def write() -> None:
            self._ranks.write(final, taken, about, shards)
            self._committed = windows
            self._ranks.together(retained, f"{final.name}/retained")

        return write

    def decided(self, index: int, window: WindowDecision) -> None:
        """Append the batch-size decision of a window; raises `SaveError` if `on_failure` is "stop"."""
        self._written(lambda: self._journal.add(index, window))

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except SaveError as error:
            self._handle_unwritten("of the batch-size decisions", error)

    def decided_before(self, index: int) -> WindowDecision | None:
        """Return the saved batch-size decision of a window, or None."""
        return self._journal.before(index)

    def close(self, error: BaseException | None = None) -> None:
        """Wait for a save in progress, then release the lock and restore the signal handlers. Saves nothing new.

        Raises:
            OSError, TrimtabError: The save in progress failed and `on_failure` is "stop".
            KeyboardInterrupt, SystemExit: A signal arrived after the last window.
        """
        with contextlib.ExitStack() as last:
            if error is None:
                last.callback(self._signals.leave_late)
            last.callback(self._release)
            last.callback(self._signals.restore)
            last.callback(self._written, self._journal.close)
            last.callback(self._background.end)
            self._wait()


def kept(
    settings: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, options: Mapping[str, Any]
) -> Run:
    """Return a run with checkpoints, resumed if `settings` allows; `UsageError` if they do not fit, with no change."""
    exchange = options["backend"].exchange
    require_supported(model, optimizer, plan, exchange, background=settings.background)
    require_saved(model, optimizer, settings.also.values())
    ranks, modules = RankCommunication(exchange), options.get("modules", ())
    # True if no rank holds all tensors of the run.
    in_shards = is_sharded(model) or (ranks.num > 1 and bool(plan.zero_stage.value))
    keeper = CheckpointManager(settings, model, optimizer, plan, ranks, in_shards=in_shards, modules=modules)
    run: Run | None = None
    try:
        run = Run(model, optimizer, plan, keeper=keeper, **options)
        keeper.attach(run)
    except BaseException as error:
        if run is not None and run.recorder is not None:
            run.recorder.refuse()
        (keeper if run is None else run).close(error)
        raise
    return run


def _contents(folder: Path) -> tuple[StateFiles, RunMetadata]:
    """Verify a folder and return its state and metadata."""
    files = StateFiles.verified(folder)
    assert files.manifest is not None
    return files, run_metadata(folder, files.manifest)


def _nothing() -> None:
    """Load nothing: this rank has no recorder state to restore."""
