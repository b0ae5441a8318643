"""The data sets themselves: hashes, counts and splits; damage is a typed error."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import platform
import shutil
import sys
import tarfile

import numpy as np
import pytest
import torch
from raising import raises

from benchmarks.paper import bpe, datasets
from benchmarks.paper.sources import Found
from benchmarks.paper.tasks import load_task
from trimtab.core.errors import DataMissingError, DependencyError, FormatError
from trimtab.tasks import embedded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def cifar10(shared_data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_DATA", str(shared_data))
        return datasets.cifar10()


@pytest.fixture(scope="session")
def wikitext2(shared_data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_DATA", str(shared_data))
        return datasets.wikitext2()


# --- embedded


def test_digits():
    data = embedded.digits()
    assert data.images.shape == (1797, 8, 8)
    assert data.images.max() == 16
    assert data.source.sha256 == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    assert data.source.origin.startswith("embedded in scikit-learn ")


def test_digits_task_data():
    data = load_task("digits_resnet").load_data()
    (images, labels), ((judged, answers),) = data.columns, data.held_out
    assert images.shape == (1438, 1, 8, 8)
    assert judged.shape == (359, 1, 8, 8)
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, rel=1e-3)
    share = torch.bincount(answers) / (torch.bincount(answers) + torch.bincount(labels))
    assert (share - 0.2).abs().max() < 0.004
    together = {image.numpy().tobytes() for image in images} & {image.numpy().tobytes() for image in judged}
    assert not together
    again = load_task("digits_resnet").load_data()
    assert torch.equal(again.held_out[0][0], judged)


def test_python_topics():
    data = embedded.python_topics()
    assert data.source.sha256 == hashlib.sha256(data.text).hexdigest()
    assert platform.python_version() in data.source.origin
    assert len(data.text) > 300_000
    if platform.python_implementation() == "CPython" and sys.version_info[:3] == (3, 11, 7):
        assert len(data.text) == 466_195
        assert data.source.sha256 == "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4"


def test_source_gpt_task_data():
    text = embedded.python_topics().text
    data = load_task("source_gpt").load_data()
    (rows,) = data.columns
    assert rows.shape == ((int(0.9 * len(text)) - 1) // 256, 257)
    assert bytes(rows[1].tolist()) == text[256:513]
    judged = torch.cat([batch[0] for batch in data.held_out])
    assert judged.shape == (48, 257)
    held_out = text[int(0.9 * len(text)) :]
    assert all(bytes(row.tolist()) in held_out for row in judged)
    assert judged.unique(dim=0).shape == judged.shape


@pytest.mark.parametrize(("package", "load"), [("sklearn", embedded.digits), ("sklearn.datasets", embedded.digits)])
def test_a_missing_scikit_learn_names_the_extra(monkeypatch, package, load):
    monkeypatch.setitem(sys.modules, package, None)
    with raises(DependencyError, code="dependency.missing", field="scikit-learn"):
        load()


def test_a_missing_tokenizers_names_the_package(monkeypatch, shared_data):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises(DependencyError, code="dependency.missing", field="tokenizers") as caught:
        bpe.load_encoder(datasets.gpt2_bpe())
    assert "pip install tokenizers" in str(caught.value)


def test_a_python_without_topics_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with raises(DataMissingError, code="data.missing", field="pydoc_data.topics"):
        embedded.python_topics()


# --- CIFAR-10


def test_cifar10_counts(cifar10):
    assert cifar10.train_images.shape == (50_000, 3, 32, 32)
    assert np.bincount(cifar10.train_labels).tolist() == [5000] * 10
    assert np.bincount(cifar10.test_labels).tolist() == [1000] * 10
    assert cifar10.source.origin == "TRIMTAB_DATA"
    mean = cifar10.train_images.mean(axis=(0, 2, 3)) / 255
    assert mean.round(4).tolist() == [0.4914, 0.4822, 0.4465]


def test_cifar10_task_data(cifar10, monkeypatch):
    monkeypatch.setattr("benchmarks.paper.cifar10.cifar10", lambda: cifar10)
    task = load_task("cifar10_resnet")
    data = task.load_data()
    assert data.num_samples == 50_000
    assert sum(len(batch[1]) for batch in data.held_out) == 2_000
    images, labels = next(data.batches(0, task.batch_size))
    assert images.shape == (128, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.isfinite(task.loss_fn(task.make_model(), (images[:4], labels[:4])))


def test_the_public_archive_gives_the_same_batches(cifar10, tmp_path):
    few = 20
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name in ("../../escape", *datasets.CIFAR10_BATCHES, "test_batch"):
            images, labels = cifar10.train_images[:few], cifar10.train_labels[:few]
            records = np.concatenate([labels[:, None], images.reshape(few, -1)], axis=1).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(records)
            archive.addfile(member, io.BytesIO(records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "BATCH_IMAGES", few)
        batches = datasets._cifar10_archive({path.name: path})
    assert len(batches) == 6
    for images, labels in batches.values():
        assert np.array_equal(images, cifar10.train_images[:few])
        assert np.array_equal(labels, cifar10.train_labels[:few])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"", b"not an archive", "one member", "short member"])
def test_a_damaged_archive_is_a_format_error(tmp_path, content):
    path = tmp_path / "cifar-10-binary.tar.gz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with tarfile.open(path, "w:gz") as archive:
            name = "data_batch_2" if content == "one member" else "data_batch_1"
            archive.addfile(tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin"), io.BytesIO())
    with raises(FormatError, code="format.invalid"):
        datasets._cifar10_archive({path.name: path})


def test_a_changed_pixel_is_found(cifar10):
    images = cifar10.test_images.copy()
    images[9999, 2, 31, 31] ^= 1
    with pytest.raises(FormatError, match=r"CIFAR-10 test images \(here\)"):
        datasets._verified(datasets.CIFAR10, Found("here", {}), {"test images": images}, datasets.CIFAR10_SHA256)


# --- WikiText-2 and its encoding


def test_wikitext2_counts(wikitext2):
    assert wikitext2.train.count(b"\n") == 36_718
    assert wikitext2.valid.count(b"\n") == 3_760
    assert sum(len(line.split()) + 1 for line in wikitext2.valid.split(b"\n")[:-1]) == 217_646


def test_encoding_in_pieces_changes_no_token(wikitext2):
    encoder = bpe.load_encoder(datasets.gpt2_bpe())
    assert encoder.encode("Hello world").ids == [15496, 995]
    text = wikitext2.valid[:150_000].decode(errors="ignore")
    pieces = bpe.encode(encoder, text)
    assert len(bpe._BEFORE_HEADING.split(text)) > 3
    assert pieces.tolist() == encoder.encode(text).ids
    assert encoder.decode(pieces.tolist()) == text
    assert bpe.encode(encoder, "").tolist() == []


@pytest.fixture
def short_split(wikitext2, monkeypatch):
    """A slice of the valid split standing for the train split; returns its text, files and tokens."""
    files, text = datasets.gpt2_bpe(), wikitext2.valid[:20_000]
    tokens = bpe.encode(bpe.load_encoder(files), text.decode())
    monkeypatch.setitem(bpe.WIKITEXT2_TOKENS, "train", (len(tokens), bpe._digest(tokens)))
    return text, files, tokens


def test_tokens_are_kept_and_read_back(short_split, monkeypatch, tmp_path):
    text, files, tokens = short_split
    assert np.array_equal(bpe.wikitext2_tokens("train", text, files), tokens)
    (kept,) = (tmp_path / "cache" / "trimtab" / "tokens").iterdir()
    monkeypatch.setattr(bpe, "load_encoder", lambda _: pytest.fail("encoded again"))
    assert np.array_equal(bpe.wikitext2_tokens("train", text, files), tokens)
    monkeypatch.undo()
    assert kept.suffix == ".npy"


@pytest.mark.parametrize("content", ["other tokens", "an object", b"", b"\x93NUMPY", b"junk"])
def test_a_damaged_token_file_is_made_again(short_split, tmp_path, content):
    text, files, tokens = short_split
    bpe.wikitext2_tokens("train", text, files)
    (kept,) = (tmp_path / "cache" / "trimtab" / "tokens").iterdir()
    if isinstance(content, bytes):
        kept.write_bytes(content)
    elif content == "an object":
        np.save(kept, np.array([{"not": "loaded"}], dtype=object), allow_pickle=True)
    else:
        np.save(kept, tokens[::-1])
    assert np.array_equal(bpe.wikitext2_tokens("train", text, files), tokens)
    assert np.array_equal(np.load(kept), tokens)


def test_other_tokens_than_expected_are_refused(short_split):
    text, files, tokens = short_split
    with pytest.raises(FormatError, match=f"expected {len(tokens):,} with"):
        bpe.wikitext2_tokens("train", text[:-100], files)


def test_wikitext2_task_data(wikitext2, monkeypatch):
    stream = np.arange(20_001, dtype=np.uint16)
    monkeypatch.setattr("benchmarks.paper.wikitext2.wikitext2_tokens", lambda split, text, files: stream)
    task = load_task("wikitext2_gpt")
    data = task.load_data()
    assert data.columns[0].shape == (156, 129)
    assert sum(len(batch[0]) for batch in data.held_out) * task.terms_per_sample == 8_192
    assert data.source.origin == "../shared/data"
    assert "word-level version" in data.source.name
    found = task.loss_fn(task.make_model(), (data.columns[0][:1],))
    assert found.count == 128
    assert found.loss_sum.item() / found.count == pytest.approx(np.log(50_257), rel=0.02)


def damage(data: bytes, how: str) -> bytes:
    if how == "truncated":
        return data[: len(data) // 2]
    if how == "flipped":
        return data[:5000] + bytes([data[5000] ^ 255]) + data[5001:]
    if how == "too long":
        return lzma.compress(lzma.decompress(data) + b"more", preset=0)
    if how == "other text":
        return lzma.compress(lzma.decompress(data).replace(b"the", b"teh"), preset=0)
    return b"no archive at all"


@pytest.mark.parametrize("how", ["truncated", "flipped", "too long", "other text", "no archive"])
def test_a_damaged_file_is_a_format_error_whatever_the_origin(shared_data, monkeypatch, tmp_path, how):
    folder = tmp_path / "wikitext-2"
    shutil.copytree(shared_data / "wikitext-2", folder)
    path = folder / "valid.txt.xz"
    path.chmod(0o644)
    damaged = damage(path.read_bytes(), how)
    folder.chmod(0o755)
    path.unlink()
    path.write_bytes(damaged)
    monkeypatch.setenv("TRIMTAB_DATA", str(tmp_path))
    with pytest.raises(FormatError, match="TRIMTAB_DATA"):
        datasets.wikitext2()


def test_a_damaged_batch_file_is_a_format_error(tmp_path):
    path = tmp_path / "data_batch_1.gz"
    for content in (b"", gzip.compress(b"short"), gzip.compress(b"x" * 5000)[:-9]):
        path.write_bytes(content)
        with raises(FormatError, code="format.invalid"):
            datasets._cifar10_folder({path.name: path})


def test_a_changed_encoding_is_a_format_error(shared_data, monkeypatch, tmp_path):
    shutil.copytree(shared_data / "gpt2", tmp_path / "gpt2", copy_function=shutil.copy)
    (tmp_path / "gpt2").chmod(0o755)
    path = tmp_path / "gpt2" / "vocab.bpe"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setenv("TRIMTAB_DATA", str(tmp_path))
    with pytest.raises(FormatError, match=r"vocab.bpe \(TRIMTAB_DATA\)"):
        datasets.gpt2_bpe()
