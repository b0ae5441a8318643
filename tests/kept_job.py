"""A job of ranks that are kept: what each says of its losses, its rows and its weights."""

from __future__ import annotations

import json

from ranks import started

RANK = """
    import json, os, signal, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    import trimtab
    from trimtab.checkpoint import ranks as kept_ranks
    from trimtab.core.errors import TrimtabError

    torch.set_num_threads(1)
    rank, folder, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    meet = f"{folder}/meet-{options['name']}"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=options.get("ranks", 2))
    torch.manual_seed(rank)  # of dropout; weights are rank 0's

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.drop, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))

    x = torch.sin(torch.arange(64 * 6.0).reshape(64, 6))
    order = torch.Generator().manual_seed(5)
    loader = trimtab.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True, generator=order))
    model, seen = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    ranks = options.get("ranks", 2)
    if options.get("own") == "fsdp":
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    elif options.get("own"):
        model = DistributedDataParallel(model)
    shared = {"num_ranks": ranks, "zero_stage": options.get("stage", 0)} if ranks > 1 and not options.get("own") else {}
    plan = trimtab.Plan.fixed(8 // ranks if options.get("even") else 4, **shared)
    if options.get("cannot_write") == rank:
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        kept_ranks.write_state = full
    if options.get("cannot_write_shards") == rank:
        import safetensors.torch
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        safetensors.torch.save = full
    if options.get("cannot_read") == rank:
        def damaged(*_, **__):
            raise ValueError("another disk")
        kept_ranks.read_state = damaged
    said, consumed, state = {}, [], {}

    def whole(value):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).double()

    def noted(window):
        # Parameters, and where no rank steps some of them alone the optimizer's averages too.
        values = [whole(p) for p in model.parameters()]
        if options.get("stage") != 1:
            values += [whole(s["exp_avg_sq"]) for s in optimizer.state.values()]
        state[window] = [float(v.abs().sum()) for v in values]

    checkpoints = trimtab.Checkpoints(f"{folder}/run", every_s=options.get("every_s"), **options.get("keep", {}))
    try:
        with trimtab.start(model, optimizer, plan, total_samples=400, checkpoints=checkpoints) as run:
            noted(run.num_windows)
            while run.passes < 4:
                for window in run.windows(loader):
                    consumed.append([run.num_windows, [round(v, 4) for v in window._batches[0][0][:, 0].tolist()]])
                    if options.get("signal") == [rank, run.num_windows]:
                        signal.raise_signal(signal.SIGTERM)
                    run.train_step(window, lambda model, b: (model(b[0]) - b[1]).square().mean())
                    said[run.num_windows] = float(run.loss).hex()
                    if run.num_windows % 5 == 0:
                        noted(run.num_windows)
                    if options.get("evaluates"):
                        with torch.no_grad():
                            run.model(x[:4])
                    if run.num_windows == options.get("dies_after"):
                        with open(f"{folder}/{options['name']}-{rank}.json", "w") as file:
                            json.dump({"said": said, "consumed": consumed, "state": state}, file)
                        os._exit(9)
        said["end"] = [float(whole(v).sum()).hex() for v in model.state_dict().values()]
    except SystemExit as left:
        said["left"] = left.code
    except (TrimtabError, ValueError) as error:
        said["error"] = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{options['name']}-{rank}.json", "w") as file:
        json.dump({"said": said, "consumed": consumed, "state": state}, file)
"""


def trained(folder, name, **options):
    """Return what each rank said, by name, and the rows that each consumed."""
    found = job(folder, name, **options)
    return [each["said"] for each in found], [each["consumed"] for each in found]


def job(folder, name, **options):
    """Return what each rank found, of ranks that all end as they should."""
    ranks = options.get("ranks", 2)
    arguments = [(rank, folder, json.dumps({"name": name} | options)) for rank in range(ranks)]
    with started(RANK, folder, arguments) as running:
        for each in running:
            status = each.wait(120)
            assert status == (9 if "dies_after" in options else 0), each.said()[-3000:]
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
