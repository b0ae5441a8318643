"""A GPU's counter by a module that is made up: the right GPU, its counter or its power, or why neither."""

from __future__ import annotations

import importlib.util

import pytest
from meter_machine import Clock, Gpu, Library, NVMLError

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy import nvml as module
from trimtab.energy.energy_meter import MeterLost, NoMeter
from trimtab.energy.nvml import SAMPLED_S, Nvml, nvml

NONE = {}


def two() -> Library:
    return Library([Gpu("GPU-aaaa-0001"), Gpu("GPU-bbbb-0002", millijoules=5_000_000)])


def test_joules_are_the_counters(monkeypatch):
    library = two()
    meter = Nvml(1, library=library, environment=NONE)
    assert meter.joules() == 5000.0
    library.gpus[1].millijoules += 1234
    assert meter.joules() == 5001.234
    assert (meter.provenance, meter.sources) == (Provenance.MEASURED, ("nvml gpu 1",))


@pytest.mark.parametrize(
    ("visible", "ordinal", "found"),
    [
        (None, 0, "GPU-aaaa-0001"),
        (None, 1, "GPU-bbbb-0002"),
        ("1", 0, "GPU-bbbb-0002"),
        ("1,0", 1, "GPU-aaaa-0001"),
        (" 1 , 0 ", 0, "GPU-bbbb-0002"),
        ("GPU-bbbb-0002", 0, "GPU-bbbb-0002"),
        ("GPU-bb", 0, "GPU-bbbb-0002"),  # CUDA takes a part that is no other's
        ("gpu-BBBB-0002,GPU-aaaa-0001", 1, "GPU-aaaa-0001"),
    ],
)
def test_the_gpu_is_the_one_that_cuda_sees(visible, ordinal, found):
    environment = NONE if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Nvml(ordinal, library=two(), environment=environment).uuid == found


@pytest.mark.parametrize(
    ("visible", "ordinal", "code"),
    [
        ("", 0, "nvml.unknown_gpu"),
        ("-1", 0, "nvml.unknown_gpu"),
        ("0", 1, "nvml.unknown_gpu"),
        ("7", 0, "nvml.unknown_gpu"),
        ("GPU-", 0, "nvml.unknown_gpu"),
        ("GPU-cc", 0, "nvml.unknown_gpu"),
        ("MIG-1234", 0, "nvml.mig"),
        ("MIG-GPU-aaaa-0001/1/0", 0, "nvml.mig"),
    ],
)
def test_a_gpu_that_cannot_be_told_is_refused(visible, ordinal, code):
    with pytest.raises(MeterLost) as caught:
        Nvml(ordinal, library=two(), environment={"CUDA_VISIBLE_DEVICES": visible})
    assert caught.value.code == code
    assert repr(visible) in str(caught.value) or f"cuda:{ordinal}" in str(caught.value)


def test_gpus_that_differ_have_two_orders():
    library = two()
    library.gpus[1].name = "a faster one"
    with pytest.raises(MeterLost, match="CUDA_DEVICE_ORDER=PCI_BUS_ID") as caught:
        Nvml(0, library=library, environment=NONE)
    assert caught.value.code == "nvml.device_order"
    assert Nvml(1, library=library, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).uuid == "GPU-bbbb-0002"
    assert Nvml(0, uuid="bbbb-0002", library=library, environment=NONE).uuid == "GPU-bbbb-0002"  # as torch tells it
    named = {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-0002"}
    assert Nvml(0, library=library, environment=named).uuid == "GPU-bbbb-0002"


def test_another_gpu_that_is_lost_takes_no_meter_from_one_that_torch_names():
    library, opened = two(), Library.nvmlDeviceGetHandleByIndex

    def open_(index: int):
        if index == 0:
            raise NVMLError(15)
        return opened(library, index)

    library.nvmlDeviceGetHandleByIndex = open_
    assert Nvml(0, uuid="bbbb-0002", library=library, environment=NONE).uuid == "GPU-bbbb-0002"
    for uuid in ("", "aaaa-0001"):  # which number it has cannot be told; it is the one that is lost
        with pytest.raises(MeterLost):
            Nvml(0, uuid=uuid, library=library, environment=NONE)


def test_a_gpu_that_is_shared_out_is_refused():
    library = two()
    library.gpus[0].mig = 1
    with pytest.raises(MeterLost, match="gpu 0") as caught:
        Nvml(0, library=library, environment=NONE)
    assert caught.value.code == "nvml.mig"
    library.gpus[0].mig = 0
    assert Nvml(0, library=library, environment=NONE).joules() == 1000.0


def test_without_a_counter_power_is_sampled_and_said_to_be():
    library, clock = Library([Gpu("GPU-a", millijoules=None, milliwatts=100_000)]), Clock()
    meter = Nvml(0, library=library, environment=NONE, clock=clock)
    clock.now += 1
    library.gpus[0].milliwatts = 200_000
    assert meter.joules() == pytest.approx(150.0)
    clock.now += 1
    assert meter.joules() == pytest.approx(350.0)
    assert meter.sources == ("nvml gpu 0 power, sampled at least every 2 s",)
    assert meter.period_s == SAMPLED_S
    clock.now += SAMPLED_S + 1
    with pytest.raises(MeterLost, match="3 s") as caught:
        meter.joules()
    assert caught.value.code == "meter.read_too_late"


def test_a_gpu_that_vanishes_is_lost_and_not_zero():
    library = two()
    meter = Nvml(0, library=library, environment=NONE)
    library.gpus[0].is_lost = True
    with pytest.raises(MeterLost, match="GPU is lost"):
        meter.joules()


def test_a_counter_that_may_not_be_read_is_lost_and_not_zero():
    library = two()
    meter = Nvml(0, library=library, environment=NONE)
    library.gpus[0].is_denied = True
    with pytest.raises(MeterLost, match="Insufficient Permissions"):
        meter.joules()
    found = nvml(0, library=library)
    assert (found.provenance, found.code) == (Provenance.ABSENT, "nvml.failed")
    assert "Insufficient Permissions" in found.reason


def test_a_driver_that_knows_neither_counters_nor_slices_tells_power():
    library = Library([Gpu("GPU-a", is_old=True)])
    assert Nvml(0, library=library, environment=NONE).sources == ("nvml gpu 0 power, sampled at least every 2 s",)


def test_without_a_driver_it_says_so():
    found = nvml(0, library=Library(starts=False))
    assert isinstance(found, NoMeter)
    assert "NVML Shared Library Not Found" in found.reason


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    assert nvml(0).code == "nvml.not_installed"
    assert "pip install 'trimtab[energy]'" in nvml(0).reason


@pytest.mark.parametrize(
    ("limits", "found"),
    [((700_000, 200_000, 700_000), (PowerLimit("gpu 0", 700.0, 200.0, 700.0),)), (None, ())],
)
def test_the_power_limit_is_read(limits, found):
    library = Library([Gpu("GPU-a", limits=limits)])
    assert Nvml(0, library=library, environment=NONE).limits() == found


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_nvidias_module_has_all_that_is_called():
    library = module.load()
    names = [name for name in dir(Library) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(library, name)] == []
