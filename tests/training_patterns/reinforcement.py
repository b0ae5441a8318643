"""Policy gradients and value learning."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from training_patterns.script import SPLIT_CHANGES, Script, adamw, classes, mlp, pattern, sgd


@pattern(outcomes=SPLIT_CHANGES)
def reinforce():
    """Returns normalised over the batch inside the loss."""
    model = mlp(outputs=4)

    def loss_fn(model, batch):
        advantages = (batch["returns"] - batch["returns"].mean()) / (batch["returns"].std() + 1e-8)
        return -(Categorical(logits=model(batch["states"])).log_prob(batch["actions"]) * advantages).mean()

    batches = [
        {"states": x, "actions": torch.randint(0, 4, (len(x),)), "returns": torch.randn(len(x)) + 2}
        for x, _ in classes()
    ]
    return Script(model, sgd(model, 0.05), loss_fn, batches)


class ActorCritic(nn.Module):
    """A policy and a value with a common body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = mlp(outputs=8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(1)


@pattern(rounding=1e-2)
def ppo():
    """A clipped ratio, a value loss and an entropy bonus; advantages come with the batch."""

    def loss_fn(model, batch):
        policy, values = model(batch["states"])
        ratio = (policy.log_prob(batch["actions"]) - batch["log_probabilities"]).exp()
        gain = batch["advantages"]
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return -surrogate + 0.5 * F.mse_loss(values, batch["returns"]) - 0.01 * policy.entropy().mean()

    batches = [
        {
            "states": x,
            "actions": torch.randint(0, 4, (len(x),)),
            "log_probabilities": torch.full((len(x),), -1.4),
            "advantages": torch.randn(len(x)),
            "returns": torch.randn(len(x)),
        }
        for x, _ in classes()
    ]
    model = ActorCritic()
    return Script(model, adamw(model), loss_fn, batches, start={"clip_norm": 0.5}, plain=clipped(0.5))


def clipped(limit):
    """Return a plain loop that clips the gradient's norm."""

    def plain(script, loop):
        scaler = loop.scaler()
        for batch in script.batches:
            script.optimizer.zero_grad()
            with loop.autocast():
                loss = script.loss_fn(script.model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(script.optimizer)
            nn.utils.clip_grad_norm_(script.model.parameters(), limit)
            scaler.step(script.optimizer)
            scaler.update()

    return plain


@pattern()
def deep_q_learning():
    """A target network that the loop copies every few steps."""
    model = mlp(outputs=4)
    target = copy.deepcopy(model).requires_grad_(False)
    steps = 0

    def loss_fn(model, batch):
        values = model(batch["states"]).gather(1, batch["actions"][:, None]).squeeze(1)
        with torch.no_grad():
            goal = batch["rewards"] + 0.9 * target(batch["next_states"]).amax(1)
        return F.smooth_l1_loss(values, goal)

    def copy_target():
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            target.load_state_dict(model.state_dict())

    batches = [
        {
            "states": x,
            "actions": torch.randint(0, 4, (len(x),)),
            "rewards": torch.randn(len(x)),
            "next_states": torch.randn_like(x),
        }
        for x, _ in classes()
    ]
    return Script(model, sgd(model, 0.02), loss_fn, batches, {"target": target}, after_step=copy_target)


@pattern(draws=True)
def sampled_actions():
    """Actions drawn in the loss, with the batch's mean reward as the baseline."""
    model = mlp(outputs=4)

    def loss_fn(model, batch):
        policy = Categorical(logits=model(batch[0]))
        actions = policy.sample()
        rewards = (actions == batch[1]).float()
        return -(policy.log_prob(actions) * (rewards - rewards.mean())).mean()

    return Script(model, sgd(model), loss_fn, classes())
