"""A job of ranks that are kept: what each says of its losses, its rows and its weights."""

from __future__ import annotations

import json

from ranks import SHARDED_CHECKPOINTS, started

RANK = """
    import json, os, signal, sys, time, warnings
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    import trimtab
    from trimtab.checkpoint import batch_size_log, manager, state_files
    from trimtab.core.errors import FormatError, TrimtabError
    from trimtab.distributed import process_group

    rank, folder, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(options["threads"][rank] if "threads" in options else 1)
    meet = f"{folder}/meet-{options['name']}"
    device, group = options.get("device", "cpu"), "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        group = "cpu:gloo,cuda:nccl"
    dist.init_process_group(group, init_method=f"file://{meet}", rank=rank, world_size=options.get("ranks", 2))
    torch.manual_seed(rank)  # of dropout; weights are rank 0's

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            norm = nn.Identity() if "rows" in options else nn.BatchNorm1d(8)  # of one row there are no statistics
            self.a, self.norm, self.drop, self.b = nn.Linear(6, 8), norm, nn.Dropout(0.2), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))

    class Mixed(nn.Module):
        # A convolution, tied matrices, a frozen one, and one with fewer rows than there are ranks.
        def __init__(self):
            super().__init__()
            self.conv, self.frozen = nn.Conv2d(2, 4, (2, 1)), nn.Linear(8, 8)
            self.a, self.b, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 1)
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = torch.tanh(self.conv(x.view(-1, 2, 3, 1))).flatten(1)
            return self.head(torch.tanh(self.b(self.a(self.frozen(x)))))

    def sgd(model):
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "momentum": 0.0, "lr": 0.05}]
        return torch.optim.SGD(groups[::-1] if options.get("swaps") else groups, lr=0.02, momentum=0.9)

    rows = options.get("rows", 64)  # of the job, or of each rank's own loader
    x = torch.sin(torch.arange(max(rows) if isinstance(rows, list) else rows)[:, None] * 6.0 + torch.arange(6))
    if options.get("no_number") is not None and rank == 1:
        x[options["no_number"]] = float("nan")
    data, order = TensorDataset(x, x.sum(1, keepdim=True)), torch.Generator().manual_seed(5)
    if isinstance(rows, list):
        data = torch.utils.data.Subset(data, range(rows[rank]))
        loader = DataLoader(data, 4, shuffle=True, generator=order)
    else:
        loader = trimtab.shard(DataLoader(data, 8, shuffle=True, generator=order))
    make = sgd if options.get("mixed") else lambda model: torch.optim.AdamW(model.parameters(), lr=0.02)
    model = (Mixed() if options.get("mixed") else Net()).to(device)
    optimizer = make(model)
    begun = [parameter.detach().clone() for parameter in model.parameters()]
    ranks = options.get("ranks", 2)
    if options.get("own") == "fsdp":
        fully_shard(model)
        optimizer = make(model)
    elif options.get("own"):
        model = DistributedDataParallel(model)
    shared = {"num_ranks": ranks, "zero_stage": options.get("stage", 0)} if ranks > 1 and not options.get("own") else {}
    plan = trimtab.Plan.fixed(4, **shared, **options.get("plan", {}))
    if options.get("cannot_write") == rank:
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        manager.write_state = full
    if "slow" in options:
        slow_rank, seconds, process_group.TIMEOUT_S = options["slow"]
        writes = manager.write_state
        def slowly(*given):
            time.sleep(seconds * (rank == slow_rank))
            writes(*given)
        manager.write_state = slowly
    if options.get("killed_in_reading") is not None:
        process_group.TIMEOUT_S = 2.0
        reads = manager.read_state
        def and_die(*given, **named):
            found = reads(*given, **named)
            if rank == options["killed_in_reading"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        manager.read_state = and_die
    if rank == 0 and "cannot" in options:
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        def refused(*_, **__):
            raise FormatError("record", got="no byte of it", expected="all")
        if options["cannot"] == "warn":
            warnings.filterwarnings("error", message=".*damaged checkpoint")
        elif options["cannot"] == "put_aside":
            manager.put_aside = full
        elif options["cannot"] == "begin":
            batch_size_log.BatchSizeLog.begin = full
        elif options["cannot"] == "record":
            loads = manager.CheckpointManager._loading
            manager.CheckpointManager._loading = lambda *given: (refused, loads(*given)[1])
    if options.get("cannot_write_shards") == rank:
        import safetensors.torch
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        safetensors.torch.save = full
    if options.get("reads_once") and rank == 0:
        read = state_files.StateFiles.read
        def others(folder, prefix=""):
            assert prefix.startswith("rank-"), "what was verified is read once more"
            return read(folder, prefix)
        state_files.StateFiles.read = others
    if options.get("cannot_read") == rank:
        def damaged(*_, **__):
            raise ValueError("another disk")
        manager.read_state = damaged
    if options.get("cannot_delete"):
        from trimtab.checkpoint import atomic_directory
        def kept(*_):
            raise OSError(13, "Permission denied")
        atomic_directory.remove = kept
    said, consumed, state, keys = {}, [], {}, []

    def whole(value):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).double()

    def noted(window):
        # Every number of the model, and of the optimizer's state that this rank steps by.
        names = {p: name for name, p in model.named_parameters()}
        steps = [p for group in optimizer.param_groups for p in group["params"]]
        state[window] = {name: whole(p).flatten().tolist() for p, name in names.items()} | {
            f"{names[p]} {key}": whole(value).flatten().tolist()
            for p in steps for key, value in optimizer.state.get(p, {}).items() if isinstance(value, torch.Tensor)
        }

    fault, at = options.get("fault", ("", 0)) if rank == 1 else ("", 0)

    def loss(model, batch):
        if fault == "raises" and run.num_windows == at:
            raise ValueError("a bad batch")
        if fault == "dies" and run.num_windows == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return (model(batch[0]) - batch[1]).square().mean()

    class Counts:
        # What a rank keeps too, of its own.
        def __init__(self):
            self.said = {"rank": rank, "windows": 0}

        def state_dict(self):
            return dict(self.said)

        def load_state_dict(self, state):
            self.said = dict(state)

    counts, record, keep = Counts(), None, options.get("keep", {})
    if options.get("own_parts"):
        path, keep = f"{folder}/record-{rank}.jsonl", keep | {"also": {"counts": counts}}
        record = trimtab.RecordWriter(path, trimtab.Header("kept"), continues=True)
    skips = {} if options.get("no_number") is None else {"nonfinite": "skip"}
    checkpoints = trimtab.Checkpoints(f"{folder}/run", every_s=options.get("every_s"), **keep)
    try:
        kept = {"checkpoints": checkpoints, "record": record}
        with trimtab.start(model, optimizer, plan, total_samples=400, **kept, **skips) as run:
            noted(run.num_windows)
            while run.passes < 4:
                if run.num_windows == options.get("leaves_after"):
                    run.checkpoint()
                for window in run.windows(loader):
                    batches = window._batches  # none where others are joined
                    consumed.append([run.num_windows, [round(v, 4) for b in batches for v in b[0][:, 0].tolist()]])
                    if options.get("signal") == [rank, run.num_windows]:
                        signal.raise_signal(signal.SIGTERM)
                    if fault == "discards" and run.num_windows == at:
                        run.accumulate(window, loss)
                        run.discard()
                        continue
                    run.train_step(window, loss)
                    said[run.num_windows] = float(run.loss).hex()
                    counts.said["windows"] += 1
                    if options.get("saves_twice") == run.num_windows:
                        run.checkpoint()
                        run.checkpoint()
                    keys.append(process_group.job_store().num_keys() if ranks > 1 else 0)
                    if run.num_windows % 5 == 0:
                        noted(run.num_windows)
                    if options.get("evaluates"):
                        with torch.no_grad():
                            run.model(x[:4].to(device))
                    if run.num_windows == options.get("leaves_after"):
                        if rank in options["interrupts"]:
                            run.interrupt()
                        break
                    if run.num_windows == options.get("dies_after"):
                        with open(f"{folder}/{options['name']}-{rank}.json", "w") as file:
                            json.dump({"said": said, "consumed": consumed, "state": state}, file)
                        os._exit(9)
        if record is not None:
            record.close()
            said["also"] = counts.said
        said["end"] = [float(whole(v).sum()).hex() for v in model.state_dict().values()]
    except SystemExit as left:
        said["left"] = left.code
    except (TrimtabError, ValueError, OSError, UserWarning) as error:
        said["error"] = f"{type(error).__name__}: {error}"
        said |= {name: getattr(error, name, None) for name in ("code", "field", "got", "expected")}
        said["moved"] = "cannot" in options and not all(map(torch.equal, begun, model.parameters()))
        said["cut"] = any(hasattr(p, "placements") for p in model.parameters())
    with open(f"{folder}/{options['name']}-{rank}.json", "w") as file:
        json.dump({"said": said, "consumed": consumed, "state": state, "keys": keys}, file)
"""


def trained(folder, name, **options):
    """Return what each rank said, by name, and the rows that each consumed."""
    found = job(folder, name, **options)
    return [each["said"] for each in found], [each["consumed"] for each in found]


def job(folder, name, **options):
    """Return what each rank found, of ranks that all end as they should."""
    expected = 9 if "dies_after" in options else 0
    found = statuses(folder, name, **options)
    said = [(folder / f"said-{rank}").read_text()[-3000:] for rank in range(len(found))]
    assert set(found) == {expected}, said
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(len(found))]


def statuses(folder, name, **options):
    """Return what each rank ends with."""
    ranks = options.get("ranks", 2)
    arguments = [(rank, folder, json.dumps({"name": name} | options)) for rank in range(ranks)]
    imports = SHARDED_CHECKPOINTS if options.get("stage") or options.get("own") == "fsdp" else ()
    with started(RANK, folder, arguments, imports=imports) as running:
        return [each.wait(120) for each in running]
