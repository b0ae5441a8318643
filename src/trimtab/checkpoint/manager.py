"""Checkpoint manager: saves a run at intervals, resumes after an interruption, and stops on a signal."""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checkpoint import atomic_directory, batch_size_log, sharded_checkpoint
from trimtab.checkpoint.atomic_directory import (
    DamagedDirectory,
    NewestDirectory,
    commit_name,
    delete_old_folders,
    name_of,
    newest_good,
    put_aside,
)
from trimtab.checkpoint.batch_size_log import BatchSizeLog
from trimtab.checkpoint.compatibility import changes, device_of, in_words, require_accepted, split_changes, world_of
from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.manifest import RunMetadata, SavedCheckpoint, said_of
from trimtab.checkpoint.rank_checkpoints import RankCommunication, found_of, is_in_shards, require_kept
from trimtab.checkpoint.run_lock import RunLock, lock_run_folder
from trimtab.checkpoint.sharded_checkpoint import ShardedState, WithoutParameters
from trimtab.checkpoint.signals import Signals
from trimtab.checkpoint.state_files import require_packable, snapshot
from trimtab.checkpoint.train_state import AdditionalState, ModelState, OptimizerState
from trimtab.checkpoint.verified_read import require_library
from trimtab.core.errors import FormatError, RankError, SaveError, TrimtabError, ValueGivenError
from trimtab.core.serialization import from_jsonable, to_jsonable, unquoted
from trimtab.core.stateful import Load, loading_parts
from trimtab.core.stopping_rule import StopReason
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.plans.plan import Plan
from trimtab.training.hooks import WindowDecision
from trimtab.training.run import Run
from trimtab.training.user_hooks import require_saved

_LOOKS = 8  # minimum clock checks per save interval, in addition to the early ones


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
        self.begun(0, is_saved=False)

    def begun(self, windows: int, *, is_saved: bool) -> None:
        """Restart the interval at `windows`. `is_saved` is False at the start of a new run and after a failed save."""
        self._at: int | None = windows if is_saved else None
        self._windows, self._since_s = windows, time.monotonic()
        self._asks_at, self._asked_at, self._asked_s = 1, 0, self._since_s

    def is_saved(self, windows: int) -> bool:
        """Return True if the last save was after `windows` windows."""
        return self._at == windows

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

    keeps = True

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
        require_library()
        self._settings, self._plan, self._ranks = settings, plan, ranks
        self._shards = ShardedState(model, optimizer)
        self._in_shards, self._whole = in_shards, ModelState(model)
        self._parts: dict[str, Any] = {"model": self._whole, "optimizer": OptimizerState(optimizer)}
        if modules:
            self._parts["modules"] = ModelState(nn.ModuleList(modules), "modules")
        self._cut: dict[str, Any] = {"model": WithoutParameters(model), "shards": self._shards}
        self._also = AdditionalState(settings.also)
        self._last_begun = 0
        # Step of the last committed checkpoint, valid even if a later stage of the save failed.
        self._committed: int | None = None
        self._accepted: dict[str, str] = {}  # accepted environment changes since the run began
        self._noted: Mapping[str, str] = {}  # environment changes that need no acceptance
        self._anew: list[str] = []  # non-persistent buffers whose saved shape differs from the model's
        self._run: Run | None = None
        self._signals, self._background = Signals(), AsyncSaver()
        self._pace = SaveInterval(settings, ranks)
        self._lock: RunLock | None = None
        self._refused: Sequence[DamagedDirectory] = ()
        try:
            said = json.loads(ranks.first(lambda: found_of(self._looked_for()), "found"))
            self._found = None if said is None else from_jsonable(SavedCheckpoint, said)
            devices = ranks.each(device_of(model), "devices")
            threads = ranks.each(str(torch.get_num_threads()), "threads")
            self._world = world_of(model, optimizer, plan, devices, threads)
            ranks.together(self._require_world, "world")  # precedes sharding, which cannot be undone
            self._journal = BatchSizeLog(
                settings.path / batch_size_log.NAME, self._world["plan"], writes=ranks.is_first
            )
            if settings.follows is not None:
                self._journal.follow(Path(settings.follows) / batch_size_log.NAME)
        except BaseException:
            self._release()
            raise

    def _looked_for(self) -> NewestDirectory | None:
        settings = self._settings
        self._lock = lock_run_folder(settings.path)
        atomic_directory.delete_temporary_files(settings.path)
        settings.require_as_asked()
        if settings.resume == "never":
            (settings.path / batch_size_log.NAME).unlink(missing_ok=True)
            return None
        found = newest_good(settings.path, said_of, self._ranks.verified.verify)
        if found.folder is None and found.refused:
            damages = " ".join(each.problem for each in found.refused)
            raise FormatError(
                str(settings.path),
                got=f"{len(found.refused)} damaged checkpoints",
                problem=f"All checkpoints in {settings.path} are damaged. {damages}",
                hint="Restore one of them from a copy, or start a new run in another folder.",
                code="checkpoint.all_damaged",
            )
        self._refused = found.refused
        return found

    def _require_world(self) -> None:
        """Raise `ValueGivenError` if the checkpoint cannot be resumed in this environment."""
        if self._found is None:
            return
        said = self._found.said
        require_accepted(changes(said.world, self._world), self._settings.accepts)
        if self._in_shards and not said.in_shards:
            raise ValueGivenError(
                "resume: shards",
                problem="The checkpoint was saved with the whole model on each rank, but this run shards the model.",
                hint="Resume with zero_stage=0, or in one process.",
                code="resume.sharding_differs",
            )

    def _release(self) -> None:
        self._ranks.verified.forget()
        if self._lock is not None:
            self._lock.release()

    def attach(self, run: Run) -> None:
        """Start managing a run, and restore the newest undamaged checkpoint if one exists.

        Damaged newer checkpoints are renamed, with a warning.

        Raises:
            UsageError: The checkpoint does not fit the run. Run and model are unchanged.
        """
        self._run = run
        run.position.accepted = self._accept_data if "data" in self._settings.accepts else None
        if run.recorder is not None:
            run.recorder.on_failure = partial(self._require_room, "of the record")
        windows = 0 if self._found is None else self._found.said.step
        # Run the steps that can fail before any change.
        self._ranks.together(partial(self._prepare, windows), "prepared")
        if self._found is not None:
            self._go_on(run, unquoted(self._found.folder), self._found.said)
        else:
            self._ranks.together(self._journal.begin, "begun")
        self._pace.begun(run.num_windows, is_saved=self._found is not None)
        self._signals.install()

    def _prepare(self, windows: int) -> None:
        assert self._run is not None
        parts = self._cut if self._in_shards else self._parts
        state = {name: part.state_dict() for name, part in parts.items()}
        # Find unsupported types now, not at the first save.
        require_packable(state | {"also": self._also.early_state()})
        if self._found is None and self._run.recorder is not None:
            self._run.recorder.require_own()
        self._journal.prepare(windows)

    def _go_on(self, run: Run, folder: Path, said: RunMetadata) -> None:
        apart = changes(said.world, self._world)
        for name, load in self._ranks.together(lambda: self._read(folder, said), "read").items():
            self._ranks.together(load, name)
        accepted, noted = split_changes(apart)
        self._accepted, self._noted = {**said.accepted, **accepted}, {**said.noted, **noted}
        detail: dict[str, Any] = {
            "from": folder.name,
            "changed": in_words(apart),
            "damaged": [each.problem for each in self._refused],
            "damaged_codes": [each.error.code for each in self._refused],
            "buffers": self._anew,
            "was_killed": self._lock is not None and self._lock.recovered is not None,
        }
        run.note("resumed", detail)

    def _accept_data(self, change: str) -> None:
        """Record that the run resumes with changed data."""
        assert self._run is not None
        self._accepted = self._accepted | {"data": change}
        self._run.note("resumed_data", {"changed": {"data": change}})

    def _put_aside(self, folder: Path) -> None:
        for refused in self._refused:
            became = (
                "was renamed and no longer counts as a checkpoint"
                if put_aside(refused.folder)
                else "was left as it is, because it is a link or not named step-N"
            )
            message = f"{refused.problem} The damaged checkpoint {became}. The run resumes from {folder.name}."
            warnings.warn(message, stacklevel=6)

    def _read(self, folder: Path, said: RunMetadata) -> Mapping[str, Load]:
        """Read the state of this rank and return the loading steps in order."""
        # Steps that can fail on a single rank come first: each runs on all ranks before the next one starts.
        state = self._ranks.read(folder, int(said.world["ranks"]))
        load_record, load_parts = self._loading(state, folder)
        self._anew = self._whole.made_anew(state["model"])
        also, aside = self._also.loading(state["also"]), partial(self._put_aside, folder)
        return {"also": also, "aside": aside, "record": load_record, "begun": self._journal.begin, "loaded": load_parts}

    def _loading(self, state: Mapping[str, Any], folder: Path) -> tuple[Load, Load]:
        """Return a function that restores the recorder, and one that restores the rest of the run."""
        run = self._run
        assert run is not None
        cut = self._cut | {"shards": self._shards.at(folder, run.stepped_by)}
        of = cut if "shards" in state else self._parts
        parts = of | {"run": run, "data": run.position}
        load_record: Load = _nothing
        if run.recorder is not None and state.get("record") is not None:
            load_record = run.recorder.loading(state["record"])
        elif run.recorder is not None:  # the saved run had no record, so a new record begins here
            run.recorder.require_own()
        load_parts = loading_parts(
            parts, {name: each for name, each in state.items() if name not in ("also", "record")}
        )
        return load_record, load_parts

    # Methods called by the run.

    def between(self) -> None:
        """Save if a save is due, and leave if a signal arrived. Called between windows.

        Raises:
            OSError, TrimtabError: A save failed and `on_failure` is "stop".
            KeyboardInterrupt, SystemExit: A signal arrived; the run has been saved.
        """
        assert self._run is not None
        if self._signals.came is not None:
            self._run.ask_to_end()
        leaves = self._run.stop_reason is StopReason.INTERRUPTED
        if leaves or self._pace.is_due(self._run.num_windows):
            self.save()
        if leaves:
            with self._told(self._last_begun):
                self._background.wait()
            self._signals.leave()

    def is_leaving(self) -> bool:
        """Return True after a signal."""
        return self._signals.came is not None

    def save(self) -> None:
        """Save the state, unless a checkpoint of this step exists; raises a failure if `on_failure` is "stop"."""
        assert self._run is not None
        windows = self._run.num_windows
        if self._pace.is_saved(windows) or self._committed == windows:
            return
        with self._told(self._last_begun):
            self._background.wait()
        self._pace.begun(windows, is_saved=False)
        finite = self._is_finite(windows)
        with self._told(windows):
            taken = self._ranks.together(self._taken, f"taken/{windows}")
            self._ranks.require_one_epoch(taken[0]["data"]["passes"])
            write = self._writing(*taken, windows, finite=finite)
            self._last_begun = windows
            self._background.begin(write) if self._settings.background else write()
            self._pace.begun(windows, is_saved=True)

    def _is_finite(self, windows: int) -> bool:
        """Return True if all parameters are finite on every rank."""
        assert self._run is not None
        found = self._ranks.each(nonfinite_parameter(self._run.model) or "", f"finite/{windows}")
        if name := next(filter(None, found), ""):
            self._run.report_nonfinite(f"NaN or infinity in parameter {name} after {windows} steps")
        return not name

    @contextlib.contextmanager
    def _told(self, windows: int) -> Iterator[None]:
        """Raise a save's error if `on_failure="stop"`, otherwise record the error and warn."""
        try:
            yield
        except RankError:  # a lost rank is no failed save
            raise
        except (OSError, TrimtabError) as error:
            if self._settings.on_failure == "stop":
                raise
            is_there = self._committed == windows
            if self._run is not None:
                code = error.code if isinstance(error, TrimtabError) else SaveError.default_code
                detail = {"windows": windows, "failed": str(error), "code": code, "is_saved": is_there}
                self._run.note("checkpoint", detail)
            if is_there:
                message = f"The checkpoint of step {windows} was saved, with an error afterwards: {error}"
            else:
                message = f"The checkpoint of step {windows} was not saved, and training continues: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    def _require_room(self, what: str, error: SaveError) -> None:
        """Raise or warn about lines that could not be written; they stay in memory for the next attempt."""
        if self._settings.on_failure == "stop":
            raise error
        message = f"Lines {what} could not be written and stay in memory until the next attempt: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=7)

    def _taken(self) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Return this rank's state, and the tensors of its shards (None for an unsharded run)."""
        run = self._run
        assert run is not None
        parts = self._cut if self._in_shards else self._parts
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"run": run.state_dict(), "data": run.position.state_dict(), "also": self._also.state_dict()}
        state |= {"record": None if run.recorder is None else run.recorder.state_dict()}
        self._journal.sync()
        own = self._ranks.own(state, self._whole.buffers)
        return own, self._shards.tensors() if self._in_shards else None

    def _writing(
        self, state: Mapping[str, Any], tensors: dict[str, Tensor] | None, windows: int, *, finite: bool
    ) -> Callable[[], None]:
        """Return a function that writes the checkpoint."""
        settings, run = self._settings, self._run
        assert run is not None
        plan = to_jsonable(self._plan)
        now = (windows, run.consumed_samples, self._world, plan, self._in_shards, self._accepted, self._noted)
        about = to_jsonable(RunMetadata(*now, finite=finite))
        taken = snapshot(state) if settings.background else state
        shards = None if tensors is None else partial(sharded_checkpoint.write, tensors=tensors)

        def retained() -> None:
            if self._ranks.is_first:
                commit_name(settings.path / name_of(windows))
                delete_old_folders(settings.path, settings.keep_last, name_of(windows))

        def write() -> None:
            self._ranks.write(settings.path, name_of(windows), taken, about, shards)
            self._committed = windows
            self._ranks.together(retained, f"{name_of(windows)}/retained")

        return write

    def decided(self, index: int, window: WindowDecision) -> None:
        """Append the batch-size decision of a window; raises `SaveError` if `on_failure` is "stop"."""
        self._written(lambda: self._journal.add(index, window))

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except SaveError as error:
            self._require_room("of the batch-size decisions", error)

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
            with self._told(self._last_begun):
                self._background.wait()


def kept(
    settings: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, options: Mapping[str, Any]
) -> Run:
    """Return a run with checkpoints, resumed if `settings` allows; `UsageError` if they do not fit, with no change."""
    exchange = options["backend"].exchange
    require_kept(model, optimizer, plan, exchange, background=settings.background)
    require_saved(model, optimizer, settings.also.values())
    in_shards = is_in_shards(model, plan, exchange)
    modules = options.get("modules", ())
    keeper = CheckpointManager(
        settings, model, optimizer, plan, RankCommunication(exchange), in_shards=in_shards, modules=modules
    )
    try:
        run = Run(model, optimizer, plan, keeper=keeper, **options)
    except BaseException as error:
        keeper.close(error)
        raise
    try:
        keeper.attach(run)
    except BaseException as error:
        if run.recorder is not None:
            run.recorder.refuse()
        run.close(error)
        raise
    return run


def _nothing() -> None:
    """Load nothing: this rank has no recorder state to restore."""
