"""A GPU that was asked for and cannot be used is refused with its cause, and `auto` says what it chose and why."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine import device
from outrider.engine.device import LEAST_DRIVERS, DeviceError, DeviceFacts, choose_device, find_device, read_facts

ONE_GPU = DeviceFacts(
    torch_version="2.13.0", torch_cuda="12.8", num_devices=1, driver="570.124.06", has_device_files=True
)
NO_GPU = replace(ONE_GPU, num_devices=0, driver=None, has_device_files=False)
MIG = "MIG-3d9a8a0e-6a9f-5d2c-9b1c-0c4b3f0d5f1a"

REFUSED = {
    "torch is a CPU build": (
        replace(ONE_GPU, num_devices=0, torch_version="2.13.0+cpu", torch_cuda=None),
        [r"torch 2\.13\.0\+cpu is built for CPUs alone", "-cuda"],
    ),
    "no driver": (NO_GPU, ["no NVIDIA driver here", "install the driver", "nvidia.com/gpu"]),
    "no driver in a container that should have one": (
        replace(NO_GPU, container_visible="all"),
        ["no device in this container", "NVIDIA_VISIBLE_DEVICES is 'all'", "runtime"],
    ),
    "a driver that is too old": (
        replace(ONE_GPU, num_devices=0, driver="470.82.01"),
        [r"driver 470\.82\.01 is too old", r"CUDA 12\.8", r"at least 525\.60\.13", "update the driver"],
    ),
    "a driver that is too old in its last number": (
        replace(ONE_GPU, num_devices=0, torch_cuda="13.0", driver="580.65.05"),
        [r"580\.65\.05 is too old", r"at least 580\.65\.06"],
    ),
    "devices hidden by CUDA_VISIBLE_DEVICES": (
        replace(ONE_GPU, num_devices=0, cuda_visible=""),
        ["CUDA_VISIBLE_DEVICES is '', which hides every device", "unset it"],
    ),
    "no limit in the pod": (
        replace(ONE_GPU, num_devices=0, has_device_files=False, container_visible="void"),
        ["no device is in this container", "NVIDIA_VISIBLE_DEVICES is 'void'", "nvidia.com/gpu in the container's"],
    ),
    "no limit in the pod, and no runtime": (
        replace(ONE_GPU, num_devices=0, has_device_files=False),
        ["NVIDIA_VISIBLE_DEVICES is not set"],
    ),
    "whatever the driver says": (
        replace(ONE_GPU, num_devices=0, failure="Error 802: system not yet initialized", cuda_visible="7"),
        ["Error 802: system not yet initialized", "CUDA_VISIBLE_DEVICES is '7'", "nvidia-smi"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", REFUSED)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_cause_and_the_way_out(cause: str) -> None:
    facts, said = REFUSED[cause]
    for words in said:
        with pytest.raises(DeviceError, match=words):
            choose_device("cuda", facts)
    with pytest.raises(DeviceError, match="or set --device cpu"):
        choose_device("cuda", facts)


@pytest.mark.parametrize("cause", REFUSED)
def test_auto_takes_the_cpu_and_says_why(cause: str) -> None:
    facts, _ = REFUSED[cause]
    chosen = choose_device("auto", facts)
    assert chosen.name == "cpu"
    assert chosen.reason.startswith("--device auto: ")
    is_there = facts.has_device_files or facts.driver is not None
    assert chosen.is_surprising is (is_there and facts.cuda_visible != ""), "a GPU that is not used is a surprise"


@pytest.mark.parametrize("choice", ["auto", "cuda"])
@pytest.mark.parametrize(
    "facts",
    [
        ONE_GPU,
        replace(ONE_GPU, cuda_visible=MIG, container_visible=MIG),
        replace(ONE_GPU, driver=None, container_visible="all"),  # the file may be hidden from the container
        replace(ONE_GPU, driver="470.82.01"),  # a package for forward compatibility is installed
        replace(ONE_GPU, num_devices=4, local_rank=3, num_local_ranks=4),
    ],
    ids=["a GPU", "a MIG device", "no file of the driver", "forward compatibility", "a rank of four"],
)
def test_a_gpu_that_torch_can_use_is_used(choice: str, facts: DeviceFacts) -> None:
    chosen = choose_device(choice, facts)
    assert (chosen.name, chosen.is_surprising) == (f"cuda:{facts.local_rank}", False)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
@pytest.mark.parametrize("rank", range(4))
def test_fewer_devices_than_ranks_are_refused_by_every_rank(choice: str, rank: int) -> None:
    facts = replace(ONE_GPU, num_devices=2, local_rank=rank, num_local_ranks=4)
    with pytest.raises(DeviceError, match=r"4 ranks run on this machine, and torch sees 2 CUDA devices"):
        choose_device(choice, facts)


def test_ranks_may_run_on_the_cpu_of_a_machine_with_fewer_gpus() -> None:
    assert choose_device("cpu", replace(ONE_GPU, local_rank=3, num_local_ranks=4)).name == "cpu"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Sat Aug  6 2022\nGCC 12.2.0\n", "470.82.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\n", "580.65.06"),
        ("NVRM version: something else\nGCC version:  gcc version 12.2.0\n", None),
        (None, None),
    ],
)  # fmt: skip
def test_the_driver_is_read_from_its_file(tmp_path: Path, text: str | None, version: str | None) -> None:
    if text is not None:
        path = tmp_path / device._DRIVER_FILE
        path.parent.mkdir(parents=True)
        path.write_text(text)
    facts = read_facts(tmp_path)
    assert (facts.driver, facts.has_device_files) == (version, False)


@pytest.mark.parametrize("name", ["nvidia0", "dxg"])
def test_device_files_are_seen(tmp_path: Path, name: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not read_facts(tmp_path).has_device_files, "that alone is no device"
    (tmp_path / "dev" / name).touch()
    assert read_facts(tmp_path).has_device_files


def test_this_torch_and_the_environment_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "3"), ("NVIDIA_VISIBLE_DEVICES", "void")):
        monkeypatch.setenv(variable, value)
    facts = read_facts(tmp_path)
    assert (facts.torch_version, facts.torch_cuda) == (torch.__version__, torch.version.cuda)
    assert (facts.local_rank, facts.num_local_ranks, facts.container_visible) == (2, 3, "void")
    assert bool(facts.num_devices) is torch.cuda.is_available()


@pytest.mark.parametrize("driver", LEAST_DRIVERS.values())
def test_the_least_drivers_are_versions(driver: str) -> None:
    choose_device("cuda", replace(ONE_GPU, driver=driver))
    assert device._version(driver) > (400,)


@pytest.mark.parametrize(
    ("facts", "level"), [(NO_GPU, logging.INFO), (REFUSED["a driver that is too old"][0], logging.WARNING)]
)
def test_one_line_says_what_was_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, facts: DeviceFacts, level: int
) -> None:
    monkeypatch.setattr(device, "read_facts", lambda: facts)
    with caplog.at_level(logging.INFO, device.__name__):
        assert find_device("auto") == "cpu"
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith("the model runs on cpu (--device auto: ")
