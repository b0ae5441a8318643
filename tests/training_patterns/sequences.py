"""Text, recurrent networks, padding and packing."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trimtab
from training_patterns.script import NO_FP16, SPLIT_CHANGES, STEPS, Block, Script, adamw, pattern, sgd, tokens


class Language(nn.Module):
    """A language model of two blocks whose head is its embedding."""

    def __init__(self, words: int = 11, width: int = 16, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model, ids):
    """Return the mean loss of the next token."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pattern()
def language_model_tied():
    """A language model whose head is tied to its embedding."""
    model = Language()
    return Script(model, adamw(model), next_token, tokens())


def padded(samples: int = 8):
    """Return batches of ids padded by zeros, with labels of -100 for padding, and the mask."""
    made = []
    for _ in range(STEPS):
        rows = [torch.randint(1, 11, (int(length),)) for length in torch.randint(2, 10, (samples,))]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        made.append({"ids": ids, "labels": ids.masked_fill(ids == 0, -100), "mask": ids != 0})
    return made


@pattern(samples=8, outcomes=SPLIT_CHANGES)
def token_means():
    """A mean over the tokens that are no padding, of samples of unlike lengths."""

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    model = Language(tied=False)
    return Script(model, adamw(model), loss_fn, padded())


@pattern(samples=8)
def token_sums():
    """The same, as a sum and its count."""

    def loss_fn(model, batch):
        loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return trimtab.Summed(loss, batch["mask"].sum())

    model = Language(tied=False)
    return Script(model, adamw(model), loss_fn, padded())


@pattern(samples=8)
def transformer_with_padding_mask():
    """torch's encoder, a key padding mask, and the mean of each sample's tokens."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 2)

        def forward(self, ids, mask):
            x = self.encoder(self.embedding(ids), src_key_padding_mask=~mask)
            return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["mask"]), batch["ids"][:, 0] % 2)

    model = Encoder()
    return Script(model, sgd(model, 0.05), loss_fn, padded())


@pattern(samples=8)
def packed_recurrent():
    """`pack_padded_sequence` with lengths, the last hidden state classified."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = (
                nn.Embedding(11, 8),
                nn.LSTM(8, 12, batch_first=True),
                nn.Linear(12, 2),
            )

        def forward(self, ids, lengths):
            x = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
            _, (hidden, _) = self.rnn(x)
            return self.head(hidden[-1])

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["lengths"]), batch["ids"][:, 0] % 2)

    batches = [{"ids": each["ids"], "lengths": each["mask"].sum(1)} for each in padded()]
    model = Reader()
    return Script(model, adamw(model), loss_fn, batches)


@pattern(samples=8)
def packed_sequence_batches():
    """Batches that are `PackedSequence` objects."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 12), nn.Linear(12, 1)

        def forward(self, packed):
            return self.head(self.rnn(packed)[1][-1])

    def batch():
        rows = [torch.randn(int(length), 4) for length in torch.randint(2, 6, (8,))]
        return nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)

    model = Reader()
    return Script(
        model, sgd(model), lambda model, packed: (model(packed) - 1).square().mean(), [batch() for _ in range(STEPS)]
    )


class HiddenState:
    """A loss that carries a recurrent network's hidden state from batch to batch, detached."""

    def __init__(self) -> None:
        self.hidden = None

    def __call__(self, model, batch):
        output, hidden = model(batch["x"], self.hidden)
        self.hidden = tuple(each.detach() for each in hidden)
        return F.mse_loss(output, batch["y"])


class Recurrent(nn.Module):
    """An LSTM with a linear head."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 8, batch_first=batch_first), nn.Linear(8, 1)

    def forward(self, x, hidden=None):
        output, hidden = self.rnn(x, hidden)
        return self.head(output), hidden


@pattern(samples=8, outcomes=SPLIT_CHANGES | NO_FP16)
def truncated_backpropagation():
    """Truncated backpropagation through time: the hidden state goes from one batch to the next."""
    series = torch.randn(8, 5 * STEPS, 3)
    batches = [{"x": part, "y": part.sum(2, keepdim=True)} for part in series.split(5, 1)]
    model = Recurrent()
    return Script(model, adamw(model), HiddenState(), batches)


@pattern(samples=6, outcomes=SPLIT_CHANGES | NO_FP16)
def time_first():
    """Batches of (time, samples, features): the first dimension is no sample."""

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0])[0], batch[1])

    batches = [(x, x.cumsum(0).sum(2, keepdim=True)) for x in torch.randn(STEPS, 6, 8, 3)]
    model = Recurrent(batch_first=False)
    return Script(model, adamw(model), loss_fn, batches)


@pattern(samples=1)
def packed_tokens():
    """All tokens of a batch in one row, with the boundaries of its sequences."""

    class Packed(Language):
        def forward(self, ids, bounds):
            parts = [ids[:, start:stop] for start, stop in itertools.pairwise(bounds)]
            return torch.cat([super(Packed, self).forward(part) for part in parts], 1)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["bounds"].tolist()).flatten(0, 1), batch["labels"].flatten())

    def batch():
        ids = torch.randint(0, 11, (1, 14))
        return {"ids": ids, "labels": ids.roll(-1, 1), "bounds": torch.tensor([0, int(torch.randint(3, 7, ())), 9, 14])}

    model = Packed(tied=False)
    return Script(model, adamw(model), loss_fn, [batch() for _ in range(STEPS)])


@pattern(samples=4)
def nested_tensor():
    """Batches that are nested tensors in the jagged layout."""

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x):
            return torch.stack([self.second(torch.tanh(self.first(each)).mean(0)) for each in x.unbind()])

    def batch():
        rows = [torch.randn(int(length), 3) for length in torch.randint(1, 6, (4,))]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    model = Pool()
    return Script(
        model, sgd(model), lambda model, batch: (model(batch) - 1).square().mean(), [batch() for _ in range(STEPS)]
    )


@pattern(draws=True, samples=8)
def scheduled_sampling():
    """A decoder that is fed its own output or the target's, by Python's generator."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.cell, self.head = nn.Embedding(11, 8), nn.GRUCell(8, 12), nn.Linear(12, 11)

        def forward(self, ids):
            hidden, word, outputs = torch.zeros(len(ids), 12), torch.zeros_like(ids[:, 0]), []
            for position in range(ids.shape[1]):
                hidden = self.cell(self.embedding(word), hidden)
                outputs.append(self.head(hidden))
                word = ids[:, position] if random.random() < 0.5 else outputs[-1].argmax(1)
            return torch.stack(outputs, 1)

    def loss_fn(model, ids):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    model = Decoder()
    return Script(model, adamw(model), loss_fn, tokens(8, 5))


@pattern(samples=6)
def texts():
    """Batches of strings that the model's own tokenizer reads, with labels."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.EmbeddingBag(64, 8), nn.Linear(8, 2)

        def forward(self, lines):
            ids = [torch.tensor([sum(map(ord, word)) % 64 for word in line.split()]) for line in lines]
            offsets = torch.tensor([0, *map(len, ids)][:-1]).cumsum(0)
            return self.head(self.embedding(torch.cat(ids), offsets))

    words = ["a", "model", "reads", "lines", "of", "text", "and", "returns", "classes"]

    def batch():
        lines = [" ".join(random.choices(words, k=random.randint(1, 6))) for _ in range(6)]
        return lines, torch.tensor([len(line.split()) % 2 for line in lines])

    model = Classifier()
    return Script(
        model,
        sgd(model),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        [batch() for _ in range(STEPS)],
    )


@pattern()
def cached_positions():
    """A table of positions in a buffer that grows in place when a longer batch comes."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
            self.register_buffer("table", torch.zeros(0, 16), persistent=False)

        def forward(self, ids):
            if ids.shape[1] > len(self.table):
                self.table.resize_(ids.shape[1], 16)
                self.table.copy_(torch.arange(ids.shape[1])[:, None] / torch.arange(1, 17))
            return self.head(torch.tanh(self.embedding(ids) + self.table[: ids.shape[1]].sin()))

    batches = [torch.randint(1, 11, (16, 4 + index // 4)) for index in range(STEPS)]
    model = Rotary()
    return Script(model, adamw(model), next_token, batches)


@pattern(samples=4)
def vision_language():
    """Patches of all samples' images in one tensor, beside token ids per sample."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.vision, self.head = nn.Embedding(11, 8), nn.Linear(12, 8), nn.Linear(8, 11)

        def forward(self, batch):
            images = [part.mean(0) for part in self.vision(batch["patches"]).split(batch["patches_per_image"].tolist())]
            return self.head(self.embedding(batch["ids"]) + torch.stack(images)[:, None])

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch["ids"].flatten())

    def batch():
        counts = torch.randint(1, 6, (4,))
        return {
            "ids": torch.randint(0, 11, (4, 6)),
            "patches": torch.randn(int(counts.sum()), 12),
            "patches_per_image": counts,
        }

    model = Net()
    return Script(model, adamw(model), loss_fn, [batch() for _ in range(STEPS)])
