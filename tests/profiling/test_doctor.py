"""Advice by what is wrong, in its order; and a whole diagnosis of the embedded model."""

from __future__ import annotations

import errno
import fcntl
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.profiling import doctor
from paceline.profiling.doctor import PARTS, ModelFacts, advise, diagnose, model_facts
from paceline.profiling.machine import Kernels, Machine, Roofs

HEALTHY = Machine(
    processor="P",
    instructions=("avx2", "avx512_vnni"),
    cores=4,
    physical_cores=4,
    cpu_quota=None,
    threads=4,
    load=0.1,
    memory_total=8 << 30,
    memory_available=6 << 30,
    governor="performance",
    huge_pages="madvise",
)
NATIVE = Kernels(None, "avx512vnni", ("avx512vnni", "avx2"))
MODEL = ModelFacts("m", dtype="int8", weight_bytes=1 << 30, has_profile=True)
LARGE = replace(MODEL, best_plain_rate=20.0, can_be_int4=True)


def test_a_healthy_machine_needs_nothing() -> None:
    assert list(advise(HEALTHY, NATIVE, MODEL, None)) == []


@pytest.mark.parametrize(("quota", "threads"), [(2.5, 2), (0.5, 1)])
def test_threads_that_fit_a_containers_quota_need_nothing(quota: float, threads: int) -> None:
    machine = replace(HEALTHY, cpu_quota=quota, threads=threads)
    assert list(advise(machine, NATIVE, MODEL, None)) == []


@pytest.mark.parametrize(
    ("machine", "kernels", "model", "word"),
    [
        ({}, Kernels("no module", remedy="compile"), MODEL, "to get them compile (no module)"),
        ({}, Kernels(None, "avx2", NATIVE.levels), MODEL, "PACELINE_CPU_ISA"),
        ({}, Kernels(None, "avx2", ("avx2",)), MODEL, "without level avx512vnni"),
        ({"instructions": ("avx2",)}, NATIVE, MODEL, "dot product"),
        ({"memory_available": 1 << 20}, NATIVE, MODEL, "reads from disk"),
        ({"cpu_quota": 1.5}, NATIVE, MODEL, "--threads 1,"),
        ({"threads": 1}, NATIVE, MODEL, "--threads 4"),
        ({"threads": 8}, NATIVE, MODEL, "--threads 4"),
        ({"physical_cores": 2, "threads": 4}, NATIVE, MODEL, "--threads 2"),
        ({"load": 3.0}, NATIVE, MODEL, "load 3.0"),
        ({}, NATIVE, replace(MODEL, has_profile=False), "paceline profile m"),
        ({"governor": "powersave"}, NATIVE, MODEL, "powersave"),
        ({"huge_pages": "never"}, NATIVE, MODEL, "madvise"),
        ({}, NATIVE, LARGE, "int4"),
    ],
)
def test_each_fault_has_its_advice(machine, kernels, model, word: str) -> None:
    (text,) = advise(replace(HEALTHY, **machine), kernels, model, None)
    assert word in text


def test_the_greatest_gain_comes_first() -> None:
    ill = replace(HEALTHY, threads=1, governor="powersave")
    found = list(
        advise(ill, Kernels("gone", remedy="compile"), replace(LARGE, has_profile=False), None)
    )
    order = ["kernels", "--threads", "profile", "powersave", "int4"]
    assert [word in text for word, text in zip(order, found, strict=True)] == [True] * 5


def test_a_diagnosis_of_the_embedded_model(monkeypatch) -> None:
    roofs = Roofs(read_gb_per_s=10.0, gflop_per_s=100.0)
    monkeypatch.setattr(doctor, "measure_roofs", lambda ops: roofs)
    found = diagnose("embedded", EngineConfig())
    assert found.roofs is roofs
    assert found.model.problem is None
    assert found.model.weight_bytes > 1 << 20
    assert found.model.best_plain_rate is None  # a cache may hold so small a model
    assert found.versions.keys() == {"paceline", "python"}
    assert {part.extra for part in found.parts} == {extra for extra, _, _ in PARTS}
    asked = [text for text in found.advice if "paceline profile" in text]
    assert all(text.endswith("paceline profile embedded") for text in asked)


def test_a_model_that_cannot_be_used_is_a_fact(tmp_path: Path) -> None:
    facts = model_facts(str(tmp_path / "none"), EngineConfig(), Roofs(1.0, 1.0))
    assert "no model" in (facts.problem or "")
    assert not [text for text in advise(HEALTHY, NATIVE, facts, None) if "profile" in text]


def test_parts_are_the_packages_extras() -> None:
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {extra for extra, _, _ in PARTS} == extras.keys() - {"dev"}
    for extra, names, _ in PARTS:
        required = " ".join(extras[extra] or project["dependencies"])
        assert all(name in required for name in names)


def test_a_missing_part_has_no_versions(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "PARTS", (("x", ("pydantic", "no-such-package"), "much"),))
    (part,) = doctor.installed_parts()
    assert (part.extra, part.gives, part.versions) == ("x", "much", {})


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system reads through its cache")
def test_a_disk_that_refuses_direct_reads_is_measured_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems take the flag, and refuse the reads."""
    read, refused = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    (path := tmp_path / "weights").write_bytes(bytes(1 << 16))
    assert doctor.disk_rate(path) > 0
    if not refused:
        pytest.skip("this file system takes no such flag")
