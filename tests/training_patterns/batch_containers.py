"""Batches of every container: lists, graphs, sparse tensors, objects, loaders with random numbers of their own."""

from __future__ import annotations

import collections
import dataclasses

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from training_patterns.script import NO_FP16, STEPS, Script, adamw, classes, cross_entropy, mlp, pattern, sgd


class Detector(nn.Module):
    """A detector of one box per image, which returns losses."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.box = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

    def forward(self, images, targets):
        losses = []
        for image, target in zip(images, targets, strict=True):
            assert image.shape[0] == 3
            features = torch.tanh(self.convolution(image[None])).mean((2, 3))
            losses.append((self.box(features) - target["boxes"].mean(0)).square().mean())
        return torch.stack(losses).mean()


def detections():
    """Return batches of (images of unlike sizes, targets with unlike numbers of boxes)."""

    def sample():
        height, width, boxes = (int(torch.randint(low, high, ())) for low, high in ((6, 10), (6, 10), (1, 4)))
        return torch.randn(3, height, width), {"boxes": torch.rand(boxes, 4), "labels": torch.ones(boxes)}

    return [tuple(map(list, zip(*(sample() for _ in range(4)), strict=True))) for _ in range(STEPS)]


@pattern(samples=4)
def detection_lists():
    """A list of images beside a list of targets."""
    model = Detector()
    return Script(model, sgd(model), lambda model, batch: model(*batch), detections())


@pattern(samples=4)
def detection_tuples():
    """The same as tuples, as `tuple(zip(*batch))` collates them."""
    model = Detector()
    batches = [tuple(map(tuple, batch)) for batch in detections()]
    return Script(model, sgd(model), lambda model, batch: model(*batch), batches)


@pattern(samples=4)
def list_of_samples():
    """A list with a dict per sample, as Detectron2 loads them."""
    model = Detector()

    def loss_fn(model, batch):
        return model([each["image"] for each in batch], [each["instances"] for each in batch])

    batches = [
        [
            {"image": image, "instances": target, "file": f"{index}.png"}
            for index, (image, target) in enumerate(zip(*batch, strict=True))
        ]
        for batch in detections()
    ]
    return Script(model, sgd(model), loss_fn, batches)


@pattern(samples=4)
def ragged_list():
    """A list of sequences of unlike lengths."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_fn(model, batch):
        return torch.stack([(model(each).mean() - each.mean()).square() for each in batch]).mean()

    batches = [[torch.randn(int(n), 3) for n in torch.randint(1, 6, (4,))] for _ in range(STEPS)]
    return Script(model, sgd(model), loss_fn, batches)


class GraphNetwork(nn.Module):
    """Two rounds of messages along edges, and a mean over each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, edges, graph, graphs):
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.tanh(x.index_add(0, edges[1], x[edges[0]]))
        sums = x.new_zeros(graphs, 8).index_add(0, graph, x)
        return self.head(sums / torch.bincount(graph, minlength=graphs)[:, None])


def graph():
    """Return four graphs as one: nodes, edges, the graph of each node, and labels."""
    sizes = torch.randint(2, 6, (4,))
    starts = sizes.cumsum(0) - sizes
    edges = torch.cat(
        [start + torch.randint(0, int(size), (2, 5)) for start, size in zip(starts, sizes, strict=True)], 1
    )
    return (
        torch.randn(int(sizes.sum()), 4),
        edges,
        torch.repeat_interleave(torch.arange(4), sizes),
        torch.randint(0, 2, (4,)),
    )


@pattern(samples=4)
def graph_dict():
    """Graphs joined into one, as a dict."""

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"], batch["edges"], batch["graph"], 4), batch["y"])

    model = GraphNetwork()
    batches = [dict(zip(("x", "edges", "graph", "y"), graph(), strict=True)) for _ in range(STEPS)]
    return Script(model, adamw(model), loss_fn, batches)


class GraphBatch:
    """Graphs joined into one, as an object with attributes and `to`, as PyG's."""

    def __init__(self) -> None:
        self.x, self.edge_index, self.batch, self.y = graph()
        self.num_graphs = 4

    def to(self, device, **options):
        return self


@pattern(samples=4)
def graph_object():
    """The same as an object of a class of the user's."""

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch.x, batch.edge_index, batch.batch, batch.num_graphs), batch.y)

    model = GraphNetwork()
    return Script(model, adamw(model), loss_fn, [GraphBatch() for _ in range(STEPS)])


@pattern(samples=8, outcomes={"half": "raises", "together": "raises"})
def node_classification():
    """One graph in every step, a mask of training nodes: as many nodes as rows, none of them a sample."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, adjacency):
            return adjacency @ self.second(torch.tanh(adjacency @ self.first(x)))

    def loss_fn(model, batch):
        output = model(batch["x"], batch["adjacency"])
        return F.cross_entropy(output[batch["train"]], batch["y"][batch["train"]])

    adjacency = torch.rand(8, 8).softmax(1)
    one = {"x": torch.randn(8, 4), "adjacency": adjacency, "y": torch.arange(8) % 3, "train": torch.arange(8) < 6}
    model = Net()
    return Script(model, adamw(model), loss_fn, [one] * STEPS)


@pattern(samples=8, outcomes=NO_FP16 | {"bf16": "raises"})
def sparse_inputs():
    """Inputs as sparse tensors."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.rest = nn.Parameter(torch.randn(12, 8) / 4), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x):
            return self.rest(torch.sparse.mm(x, self.weight))

    model = Wide()
    batches = [
        ((torch.randn(8, 12) * (torch.rand(8, 12) < 0.3)).to_sparse(), torch.randint(0, 3, (8,))) for _ in range(STEPS)
    ]
    return Script(model, sgd(model), cross_entropy, batches)


@dataclasses.dataclass
class Example:
    """A batch as a dataclass."""

    inputs: torch.Tensor
    labels: torch.Tensor
    source: str = "made"


@pattern()
def dataclass_batches():
    """Batches as a dataclass."""
    model = mlp()

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch.inputs), batch.labels)

    return Script(model, sgd(model), loss_fn, [Example(x, y) for x, y in classes()])


@pattern()
def mapping_batches():
    """Batches as a `UserDict`, as tokenizers return them, unpacked into the forward."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, input_values, labels):
            return F.cross_entropy(self.body(input_values), labels)

    model = Net()
    batches = [collections.UserDict(input_values=x, labels=y) for x, y in classes()]
    return Script(model, sgd(model), lambda model, batch: model(**batch), batches)


@pattern()
def named_tuple_batches():
    """Batches as a named tuple with texts, numbers and None."""
    kind = collections.namedtuple("kind", ["x", "y", "names", "epoch", "extra"])
    model = mlp()

    def loss_fn(model, batch):
        assert len(batch.names) == len(batch.y)
        return F.cross_entropy(model(batch.x), batch.y)

    return Script(model, sgd(model), loss_fn, [kind(x, y, [str(n) for n in y.tolist()], 3, None) for x, y in classes()])


@pattern()
def popped_labels():
    """A step that takes the labels out of its batch."""
    model = mlp()

    def loss_fn(model, batch):
        labels = batch.pop("labels")
        return F.cross_entropy(model(**batch), labels)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x)

    model = Net()
    return Script(model, sgd(model), loss_fn, [{"x": x, "labels": y} for x, y in classes()])


@pattern()
def normalised_in_place():
    """A step that scales its input in place."""
    model = mlp()

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0].sub_(0.5).div_(2)), batch[1])

    return Script(model, sgd(model), loss_fn, classes())


@pattern()
def results_written_to_batch():
    """A step that writes its outputs into the batch."""
    model = mlp()

    def loss_fn(model, batch):
        batch["logits"] = model(batch["x"])
        batch["loss"] = F.cross_entropy(batch["logits"], batch["y"])
        return batch["loss"]

    return Script(model, sgd(model), loss_fn, [{"x": x, "y": y} for x, y in classes()])


@pattern()
def numpy_batches():
    """Batches of NumPy arrays that the loss turns into tensors."""
    model = mlp()

    def loss_fn(model, batch):
        return F.cross_entropy(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))

    return Script(model, sgd(model), loss_fn, [{"x": x.numpy(), "y": y.numpy()} for x, y in classes()])


class Noisy(Dataset):
    """Samples that a generator of the dataset's augments."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.samples = torch.randn(16 * STEPS, 6)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        return sample + 0.1 * torch.randn(6, generator=self.generator), sample[:3].argmax()


@pattern()
def loader_with_own_generator():
    """A shuffled loader of a dataset with a generator of its own."""
    model = mlp()
    return Script(model, sgd(model), cross_entropy, DataLoader(Noisy(), batch_size=16, shuffle=True))


class Stream(IterableDataset):
    """A stream that can be read once."""

    def __init__(self) -> None:
        self.samples = iter([(x[index], y[index]) for x, y in classes() for index in range(len(y))])

    def __iter__(self):
        return self.samples


@pattern()
def stream_read_once():
    """A loader of a stream that cannot begin again."""
    model = mlp()
    return Script(model, sgd(model), cross_entropy, DataLoader(Stream(), batch_size=16))


@pattern()
def short_last_batch():
    """A last batch of fewer samples."""
    model = mlp()
    batches = classes()
    batches[-1] = tuple(each[:5] for each in batches[-1])
    return Script(model, sgd(model), cross_entropy, batches)
