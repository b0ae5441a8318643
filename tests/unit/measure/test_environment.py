"""The environment names every version a figure depends on, this library's own among them."""

from __future__ import annotations

import importlib.metadata

import torch

from trimtab.measure.machine import environment


def test_it_names_the_versions():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["trimtab"] == importlib.metadata.version("trimtab")
    assert all(isinstance(value, str) and value for value in found.values())


def test_a_gpu_that_was_not_used_is_not_asked_for_its_name(monkeypatch):
    """To ask initialises CUDA, after which no process can be forked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert environment()["gpu"] == environment(has_gpu=True)["gpu"] == "a GPU"
    assert "gpu" not in environment(has_gpu=False)
