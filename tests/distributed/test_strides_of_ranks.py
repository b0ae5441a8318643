"""What ranks send each other arrives as it was, however it lies in memory on each of them."""

from __future__ import annotations

from ranks import run_cases, run_codes

TRAINED = """
    def trained(layout):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=1, memory_layout=layout)
        generator = torch.Generator().manual_seed(3)
        batches = [torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
        with trimtab.start(model, optimizer, plan) as run:
            for window in run.windows(trimtab.shard(batches)):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
        return [optimizer.state[each] for each in model.parameters()]

    for kept, laid_out in zip(trained("keep"), trained("channels_last"), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            theirs = [torch.empty(kept[name].shape, dtype=torch.float64) for _ in range(2)]
            dist.all_gather(theirs, laid_out[name].contiguous())
            assert torch.equal(*theirs), name
            torch.testing.assert_close(laid_out[name], kept[name])
            assert laid_out[name].stride() == kept[name].stride()
"""
BUFFERS = """
    stage, engine = case

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(8, 2)
            self.register_buffer("expanded", torch.full((1,), 1.0 + rank).expand(4096))
            self.register_buffer("transposed", (torch.arange(6.0).reshape(2, 3) + 10 * rank).t())
            self.register_buffer("behind", torch.full((64,), 5.0 + rank))

    model = Model()
    lies = [each.stride() for each in model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=stage, engine=engine)
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows([torch.ones(4, 8)]):
            run.train_step(window, lambda model, batch: model(batch).square().mean())
            assert model.expanded.tolist() == [1.0] * 4096
            assert torch.equal(model.transposed, torch.arange(6.0).reshape(2, 3).t())
            assert model.behind.tolist() == [5.0] * 64
    assert [each.stride() for each in model.buffers()] == lies
"""
REFUSED = """
    from trimtab.core.errors import ValueGivenError

    how = dict(zip(("zero_stage", "engine"), case))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [(type(each), each.stride()) for each in model.parameters()]
    try:
        trimtab.start(model, optimizer, trimtab.Plan.fixed(4, num_ranks=2, **how))
    except ValueGivenError as error:
        found = {"code": error.code, "got": error.got, "text": str(error)}
    else:
        raise AssertionError("it was not refused")
    try:
        laid_out = trimtab.Plan.fixed(4, num_ranks=2, memory_layout="channels_last", **how)
        trimtab.start(model, optimizer, laid_out)
    except ValueGivenError as error:
        assert (error.code, error.field) == ("plan.layout_with_shards", "plan.memory_layout")
    else:
        raise AssertionError("it was not refused")
    assert [(type(each), each.stride()) for each in model.parameters()] == before
    assert not hasattr(model, "reshard")
    model.to(memory_format=torch.contiguous_format)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4, num_ranks=2, **how)):
        pass
"""


BUFFERS_OF, REFUSED_BY = [(0, "torch"), (2, "torch"), (1, "deepspeed")], [(2, "torch"), (3, "torch"), (1, "deepspeed")]


def test_what_ranks_send_is_that_of_its_owner_on_every_rank(tmp_path):
    """Moments of weights that lie channels last, and buffers of any strides, which become those of rank 0."""
    run_codes(tmp_path, [(TRAINED, None), *((BUFFERS, case) for case in BUFFERS_OF)])


def test_weights_that_cannot_be_sharded_are_refused_before_anything_is_changed(tmp_path):
    for (stage, _), ranks in zip(REFUSED_BY, run_cases(REFUSED, tmp_path, *REFUSED_BY), strict=True):
        for said in ranks:
            assert said["code"] == "model.not_contiguous"
            assert said["got"] == "0.weight with strides (27, 1, 9, 3)"
            assert f"zero_stage={stage}" in said["text"]
            assert "zero_stage 0 or 1" in said["text"]
