"""Optimizers, hooks, schedules, averages of the weights: what happens around the step."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

import trimtab
from training_patterns.script import (
    GRADIENT_HOOKS,
    NOT_FUSED,
    REFUSED,
    SPLIT_CHANGES,
    Block,
    Script,
    adamw,
    classes,
    cross_entropy,
    mlp,
    pattern,
    sgd,
)


@pattern()
def average_by_optimizer_hook():
    """An average of the weights, moved by a hook of the optimizer's step."""
    model = mlp()
    average, optimizer = copy.deepcopy(model).requires_grad_(False), sgd(model)

    @torch.no_grad()
    def follow(*_):
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    optimizer.register_step_post_hook(follow)
    return Script(model, optimizer, cross_entropy, classes(), {"average": average})


@pattern()
def average_by_loop():
    """An average of the weights, moved by the loop."""
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    follow = lambda: average.update_parameters(model)  # noqa: E731
    return Script(model, adamw(model), cross_entropy, classes(), {"average": average}, after_step=follow)


class SharpnessAware(torch.optim.SGD):
    """SAM: the gradient at a point uphill, by a closure (Foret et al. 2021)."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm() + 1e-12
        moves = [0.05 * p.grad / norm for p in held]
        with torch.no_grad():
            torch._foreach_add_(held, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(held, moves)
        super().step()
        return loss


def with_closure(script, loop):
    """Train by `optimizer.step(closure)`."""
    for batch in script.batches:

        def closure():
            script.optimizer.zero_grad()
            with loop.autocast():
                loss = script.loss_fn(script.model, batch)  # noqa: B023
            loss.backward()
            return loss

        script.optimizer.step(closure)


@pattern(outcomes=REFUSED)
def sam_by_closure():
    """SAM whose step needs a closure."""
    model = mlp()
    optimizer = SharpnessAware(model.parameters(), lr=0.1)
    return Script(model, optimizer, cross_entropy, classes(), plain=with_closure)


@pattern(outcomes=REFUSED)
def lbfgs():
    """L-BFGS, whose step needs a closure."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    return Script(model, optimizer, cross_entropy, classes(), plain=with_closure)


class ClosureByName(torch.optim.SGD):
    """An optimizer whose closure is optional by its signature, and needed."""

    def step(self, closure=None):
        closure()
        super().step()


@pattern(outcomes=REFUSED)
def closure_optional_by_signature():
    """An optimizer that calls a closure that its signature calls optional."""
    model = mlp()
    return Script(model, ClosureByName(model.parameters(), lr=0.1), cross_entropy, classes(), plain=with_closure)


@pattern(outcomes=SPLIT_CHANGES)
def sam_inside_loss():
    """SAM as a loss of two forwards: the second one with weights moved uphill, by `functional_call`."""
    model = mlp()

    def loss_fn(model, batch):
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(cross_entropy(model, batch), list(weights.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12
        moved = {name: w + 0.05 * g / norm for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, moved, batch[0]), batch[1])

    return Script(model, sgd(model), loss_fn, classes())


@pattern(outcomes=GRADIENT_HOOKS | {"planned": "refused"})
def layer_wise_steps_in_backward():
    """An optimizer per parameter, stepped by hooks in the backward; the loop's own has nothing to do."""
    model = mlp()
    each = {parameter: torch.optim.Adam([parameter], lr=1e-2) for parameter in model.parameters()}

    def step(parameter):
        each[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return Script(model, torch.optim.SGD(model.parameters(), lr=0.0), cross_entropy, classes())


@pattern(outcomes=GRADIENT_HOOKS)
def clipped_by_tensor_hooks():
    """Each gradient clamped by a hook of its parameter."""
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    return Script(model, sgd(model), cross_entropy, classes())


@pattern(outcomes=GRADIENT_HOOKS)
def clipped_by_post_accumulate_hooks():
    """Each gradient's norm clipped by a hook after it is accumulated."""
    model = mlp()

    def clip(parameter):
        nn.utils.clip_grad_norm_([parameter], 1e-2)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return Script(model, sgd(model), cross_entropy, classes())


@pattern(outcomes=GRADIENT_HOOKS)
def gradients_by_module_hook():
    """A full backward hook that scales the gradient of a block's input."""
    model = mlp()
    model[1].register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 0.5 for g in inputs))
    return Script(model, sgd(model), cross_entropy, classes())


@pattern()
def clipped_by_loop():
    """`clip_grad_norm_` between backward and step."""
    model = mlp()
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    return Script(model, sgd(model), cross_entropy, classes(), before_step=clip)


@pattern()
def clipped_by_value():
    """`clip_grad_value_` between backward and step."""
    model = mlp()
    clip = lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-2)  # noqa: E731
    return Script(model, sgd(model), cross_entropy, classes(), before_step=clip)


@pattern()
def centralised_by_optimizer_hook():
    """Gradients centralised by a hook before the optimizer's step."""
    model = mlp()
    optimizer = sgd(model)

    @torch.no_grad()
    def centralise(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))

    optimizer.register_step_pre_hook(centralise)
    return Script(model, optimizer, cross_entropy, classes())


@pattern(draws=True)
def gradient_noise():
    """Noise added to gradients between backward and step."""
    model = mlp()

    def add_noise():
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)

    return Script(model, sgd(model), cross_entropy, classes(), before_step=add_noise)


@pattern()
def scheduler_in_loop():
    """Warm-up and cosine, stepped by the loop."""
    model = mlp()
    optimizer = adamw(model)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [5])
    return Script(model, optimizer, cross_entropy, classes(), after_step=scheduler.step)


@pattern()
def one_cycle():
    """One cycle of learning rate and momentum."""
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=25)
    return Script(model, optimizer, cross_entropy, classes(), after_step=scheduler.step)


class Scheduled(torch.optim.SGD):
    """An optimizer that sets its own learning rate inside `step`, as that of the Annotated Transformer."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.2 * min(self.count**-0.5, self.count / 8)
        return super().step(closure)


@pattern(outcomes=NOT_FUSED)
def schedule_inside_step():
    """A schedule inside the optimizer's step."""
    model = mlp()
    return Script(model, Scheduled(model.parameters(), 0.0), cross_entropy, classes())


@pattern()
def accumulation_in_loop():
    """Two loader batches per step."""
    model = mlp()
    return Script(model, sgd(model), cross_entropy, classes(), per_step=2)


@pattern()
def groups_without_decay():
    """Weight decay for matrices alone, rates per layer."""
    model = mlp()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return Script(model, torch.optim.AdamW(groups, lr=1e-2), cross_entropy, classes())


@pattern()
def frozen_then_unfrozen():
    """The first layers frozen for half of the training."""
    model, steps = mlp(), 0
    model[:2].requires_grad_(False)

    def unfreeze():
        nonlocal steps
        steps += 1
        if steps == 10:
            model.requires_grad_(True)

    return Script(model, sgd(model), cross_entropy, classes(), after_step=unfreeze)


@pattern()
def group_added_later():
    """A head first; the body's parameters join the optimizer later."""
    model, steps = mlp(), 0
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    model[:3].requires_grad_(False)

    def join():
        nonlocal steps
        steps += 1
        if steps == 10:
            model[:3].requires_grad_(True)
            optimizer.add_param_group({"params": model[:3].parameters(), "lr": 0.01})

    return Script(model, optimizer, cross_entropy, classes(), after_step=join)


@pattern()
def part_of_parameters():
    """An optimizer of the head alone; the body requires gradients that nothing steps."""
    model = mlp()
    return Script(model, sgd(model[3]), cross_entropy, classes())


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *parts):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure=None):
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(itertools.islice(groups, len(part.param_groups)))
            part.state = self.state
            part.step()


@pattern(outcomes=NOT_FUSED)
def two_optimizers_as_one():
    """AdamW for the body and SGD for the head, behind one `step`."""
    model = mlp()
    both = Both(torch.optim.AdamW(model[:3].parameters(), lr=1e-2), torch.optim.SGD(model[3].parameters(), lr=0.1))
    return Script(model, both, cross_entropy, classes())


@pattern()
def two_optimizers_in_loop():
    """A second optimizer, of the head, stepped by the loop after the first."""
    model = mlp()
    body, head = torch.optim.AdamW(model[:3].parameters(), lr=1e-2), torch.optim.SGD(model[3].parameters(), lr=0.1)

    def step_head():
        head.step()
        head.zero_grad()

    return Script(model, body, cross_entropy, classes(), after_step=step_head)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow a wrapped optimizer's every fifth step (Zhang et al. 2019)."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.state = inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 5 == 0:
            for slow, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


@pattern(outcomes=NOT_FUSED)
def lookahead():
    """Lookahead around AdamW."""
    model = mlp()
    return Script(model, Lookahead(adamw(model)), cross_entropy, classes())


class SignOfMomentum(torch.optim.Optimizer):
    """Lion, written by the user."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


@pattern(rounding=0.5, outcomes=NOT_FUSED)
def optimizer_of_the_user():
    """Lion: a sign, which rounding turns where a gradient is next to zero."""
    model = mlp()
    return Script(model, SignOfMomentum(model.parameters(), 1e-3), cross_entropy, classes())


@pattern(outcomes=NOT_FUSED)
def wrapped_step():
    """A `step` that the user's script replaced on the object, to count and to clip."""
    model = mlp()
    optimizer = sgd(model)
    plain = optimizer.step

    def step(closure=None):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return plain(closure)

    optimizer.step = step
    return Script(model, optimizer, cross_entropy, classes())


@pattern()
def wrapped_zero_grad():
    """A `zero_grad` that keeps a tenth of the last gradient."""
    model = mlp()
    optimizer = sgd(model)

    def zero_grad(set_to_none=True):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)

    optimizer.zero_grad = zero_grad
    return Script(model, optimizer, cross_entropy, classes())


@pattern(outcomes=SPLIT_CHANGES)
def surgery_of_gradients():
    """PCGrad: gradients of two tasks, projected, and put into `grad` inside the loss function."""
    model = mlp(outputs=4)

    def loss_fn(model, batch):
        output, parameters = model(batch[0]), list(model.parameters())
        first, second = F.cross_entropy(output[:, :3], batch[1]), output[:, 3].square().mean()
        one = torch.autograd.grad(first, parameters, retain_graph=True)
        two = torch.autograd.grad(second, parameters, retain_graph=True)
        dot = sum((a * b).sum() for a, b in zip(one, two, strict=True))
        factor = min(0.0, float(dot / sum(b.square().sum() for b in two)))
        return first + second - factor * second

    return Script(model, sgd(model), loss_fn, classes())


@pattern(outcomes=NOT_FUSED)
def sparse_embedding():
    """Sparse gradients of an embedding, by SparseAdam."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(30, 8, sparse=True)

        def forward(self, ids):
            return self.embedding(ids).mean(1).tanh()

    def loss_fn(model, batch):
        return (model(batch) - 0.5).square().mean()

    model = Net()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    return Script(model, optimizer, loss_fn, [torch.randint(0, 30, (16, 3)) for _ in range(20)])


@pattern(outcomes=NOT_FUSED)
def sparse_embedding_by_sgd():
    """Sparse gradients of an embedding beside dense ones, by SGD."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(30, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, ids):
            return self.head(self.embedding(ids).mean(1))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [(ids, ids.sum(1) % 3) for ids in torch.randint(0, 30, (20, 16, 3))]
    return Script(model, optimizer, cross_entropy, batches)


@pattern()
def learning_rate_as_tensor():
    """AdamW with a tensor as its learning rate."""
    model = mlp()
    return Script(model, adamw(model, torch.tensor(1e-2), foreach=False), cross_entropy, classes())


@pattern()
def nesterov_maximised():
    """SGD with Nesterov momentum that maximises the negative loss."""
    model = mlp()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, maximize=True, weight_decay=1e-3
    )
    return Script(model, optimizer, lambda model, batch: -cross_entropy(model, batch), classes())


@pattern()
def amsgrad():
    """Adam with AMSGrad and coupled decay."""
    model = mlp()
    return Script(
        model, torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, weight_decay=1e-2), cross_entropy, classes()
    )


@pattern(outcomes=NOT_FUSED)
def dampened_momentum():
    """SGD with dampening, whose first step is unlike the others."""
    model = mlp()
    return Script(model, sgd(model, dampening=0.5), cross_entropy, classes())


@pattern(rounding=1e-2, outcomes=NOT_FUSED)
def other_optimizers_of_torch():
    """Adafactor, as torch has it."""
    model = mlp()
    return Script(model, torch.optim.Adafactor(model.parameters(), lr=3e-2), cross_entropy, classes())


@pattern()
def unused_branch():
    """Layers that only some batches use: their gradient is None in others."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branches, self.head = (
                nn.Linear(6, 16),
                nn.ModuleList([Block(16), Block(16)]),
                nn.Linear(16, 3),
            )

        def forward(self, x, branch):
            return self.head(self.branches[branch](self.first(x)))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"], batch["task"]), batch["y"])

    model = Net()
    batches = [{"x": x, "y": y, "task": index % 3 // 2} for index, (x, y) in enumerate(classes())]
    return Script(model, sgd(model), loss_fn, batches)


@pattern()
def started_twice():
    """A run that is ended half way and begun again."""
    model = mlp()

    def through(script, plan):
        for part in (script.batches[:10], script.batches[10:]):
            with trimtab.start(script.model, script.optimizer, plan) as run:
                for window in run.windows(part):
                    run.train_step(window, script.loss_fn)

    return Script(model, adamw(model), cross_entropy, classes(), through=through)
