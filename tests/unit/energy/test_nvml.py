"""A GPU's counter by a module that is made up: the right GPU, its counter, or why there is none."""

from __future__ import annotations

import importlib.util

import pytest
from meter_machine import Gpu, Library, NVMLError

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy import nvml as module
from trimtab.energy.energy_meter import MeterLost, NoMeter
from trimtab.energy.nvml import Nvml, nvml

FIRST, SECOND = "aaaa-0001", "bbbb-0002"  # as torch writes them


@pytest.fixture
def library() -> Library:
    return Library([Gpu("GPU-aaaa-0001"), Gpu("GPU-bbbb-0002", millijoules=5_000_000)])


def test_joules_are_the_counters(library):
    meter = Nvml(SECOND, library=library)
    assert meter.joules() == 5000.0
    library.gpus[1].millijoules += 1234
    assert meter.joules() == 5001.234
    assert (meter.provenance, meter.sources) == (Provenance.MEASURED, ("nvml gpu 1",))


@pytest.mark.parametrize("uuid", [SECOND, "GPU-bbbb-0002", "gpu-BBBB-0002"])
def test_the_gpu_is_the_one_that_torch_names(library, uuid):
    assert Nvml(uuid, library=library).sources == ("nvml gpu 1",)


@pytest.mark.parametrize("uuid", ["", "GPU-", "bbbb", "cccc-0003", "MIG-1234"])
def test_a_gpu_that_nvml_does_not_find_is_refused(library, uuid):
    with pytest.raises(MeterLost) as caught:
        Nvml(uuid, library=library)
    assert caught.value.code == "nvml.unknown_gpu"


def test_another_gpu_that_is_lost_takes_no_meter_from_one_that_torch_names(library, monkeypatch):
    opened = Library.nvmlDeviceGetHandleByIndex

    def open_(self, index: int):
        if index == 0:
            raise NVMLError(15)
        return opened(self, index)

    monkeypatch.setattr(Library, "nvmlDeviceGetHandleByIndex", open_)
    assert Nvml(SECOND, library=library).sources == ("nvml gpu 1",)
    with pytest.raises(MeterLost):
        Nvml(FIRST, library=library)


def test_a_gpu_that_is_shared_out_is_refused(library):
    library.gpus[0].mig = 1
    with pytest.raises(MeterLost, match="gpu 0") as caught:
        Nvml(FIRST, library=library)
    assert caught.value.code == "nvml.mig"
    library.gpus[0].mig = 0
    assert Nvml(FIRST, library=library).joules() == 1000.0


@pytest.mark.parametrize("gpu", [Gpu("GPU-a", millijoules=None), Gpu("GPU-a", is_old=True)])
def test_a_gpu_without_a_counter_is_refused(gpu):
    assert nvml("a", library=Library([gpu])).code == "nvml.failed"


@pytest.mark.parametrize(("fault", "words"), [("is_lost", "GPU is lost"), ("is_denied", "Insufficient Permissions")])
def test_a_counter_that_fails_is_lost_and_not_zero(library, fault, words):
    meter = Nvml(FIRST, library=library)
    setattr(library.gpus[0], fault, True)
    with pytest.raises(MeterLost, match=words):
        meter.joules()
    found = nvml(FIRST, library=library)
    assert (found.provenance, found.code) == (Provenance.ABSENT, "nvml.failed")
    assert words in found.reason


def test_without_a_driver_it_says_so():
    found = nvml(FIRST, library=Library(starts=False))
    assert isinstance(found, NoMeter)
    assert "NVML Shared Library Not Found" in found.reason


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    assert nvml(FIRST).code == "nvml.not_installed"
    assert "pip install 'trimtab[energy]'" in nvml(FIRST).reason


@pytest.mark.parametrize(
    ("limits", "found"),
    [((700_000, 200_000, 700_000), (PowerLimit("gpu 0", 700.0, 200.0, 700.0),)), (None, ())],
)
def test_the_power_limit_is_read(limits, found):
    assert Nvml("a", library=Library([Gpu("GPU-a", limits=limits)])).limits() == found


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_nvidias_module_has_all_that_is_called():
    library = module.load()
    names = [name for name in dir(Library) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(library, name)] == []
