"""Facts out of a made-up ``/proc`` and ``/sys``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.machine import cpu_quota, memory
from paceline.models.threads import within_quota
from paceline.profiling.machine import Machine, describe_kernels, describe_machine


def make_root(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def test_what_linux_tells(tmp_path: Path) -> None:
    cpus = {
        f"sys__devices__system__cpu__cpu{i}__topology__thread_siblings_list": "0-999"
        for i in os.sched_getaffinity(0)
    }
    found = describe_machine(
        make_root(
            tmp_path,
            proc__cpuinfo="processor : 0\nflags : fpu avx2 avx_vnni\n\nprocessor : 1",
            proc__loadavg="3.25 1.00 0.50 1/100 7",
            proc__meminfo="MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  900 kB",
            sys__fs__cgroup__cpu_DOT_max="150000 100000",
            sys__fs__cgroup__memory_DOT_max="614400",
            sys__fs__cgroup__memory_DOT_current="204800",
            sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave",
            sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never",
            **cpus,
        )
    )
    assert found.instructions == ("avx2", "avx_vnni")
    assert (found.load, found.cpu_quota, found.physical_cores) == (3.25, 1.5, 1)
    assert (found.memory_total, found.memory_available) == (614400, 409600)
    assert found.governor == "powersave"
    assert found.huge_pages == "madvise"


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_the_control_groups_around_a_process_counts(
    tmp_path: Path, version: int
) -> None:
    limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    place = "sys__fs__cgroup__" + ("" if version == 2 else "memory__")
    line = "0::/outer/inner" if version == 2 else "7:cpu:/\n4:memory:/outer/inner"
    sizes = {"": (900_000, 10), "outer__": (500_000, 100_000), "outer__inner__": (700_000, 5)}
    files = {
        f"{place}{group}memory_DOT_{name}": str(value)
        for group, pair in sizes.items()
        for name, value in zip((limit, used), pair, strict=True)
    }
    meminfo = "MemTotal:  1000 kB\nMemAvailable:  900 kB"
    root = make_root(tmp_path, proc__self__cgroup=line, proc__meminfo=meminfo, **files)
    assert memory(root) == (500_000, 400_000)
    idle = "inactive_file 30000" if version == 2 else "inactive_file 5\ntotal_inactive_file 30000"
    stat = {f"{place}outer__memory_DOT_stat": f"anon 70000\nactive_file 7\n{idle}"}
    assert memory(make_root(tmp_path, **stat)) == (500_000, 430_000)


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_the_quota_of_the_first_version_of_control_groups(tmp_path: Path, folder: str) -> None:
    times = {"": ("-1", "100000"), "outer__": ("250000", "100000"), "outer__inner__": ("-1", "5")}
    files = {
        f"sys__fs__cgroup__{folder}__{group}cpu_DOT_cfs_{name}_us": value
        for group, pair in times.items()
        for name, value in zip(("quota", "period"), pair, strict=True)
    }
    lines = "4:memory:/\n3:cpu,cpuacct:/outer/inner"
    assert cpu_quota(make_root(tmp_path, proc__self__cgroup=lines, **files)) == 2.5


def test_the_quota_of_a_group_around_this_one_counts(tmp_path: Path) -> None:
    place = "sys__fs__cgroup__"
    files = {
        f"{place}cpu_DOT_max": "max 100000",
        f"{place}outer__cpu_DOT_max": "50000 100000",
        f"{place}outer__inner__cpu_DOT_max": "300000 100000",
    }
    assert cpu_quota(make_root(tmp_path, proc__self__cgroup="0::/outer/inner", **files)) == 0.5


@pytest.mark.parametrize(
    ("threads", "quota", "expected"), [(8, None, 8), (8, 2.5, 2), (2, 4.0, 2), (4, 0.5, 1)]
)
def test_a_container_gets_as_many_threads_as_it_has_time_for(
    threads: int, quota: float | None, expected: int
) -> None:
    assert within_quota(threads, quota) == expected


@pytest.mark.parametrize(
    "files",
    [
        {},
        {
            "proc__cpuinfo": "nothing here",
            "proc__loadavg": "x",
            "proc__meminfo": "MemTotal:\nMemAvailable: many kB",
            "sys__fs__cgroup__cpu_DOT_max": "max 100000",
            "sys__fs__cgroup__memory_DOT_max": "max",
            "sys__kernel__mm__transparent_hugepage__enabled": "never",
        },
    ],
)
def test_what_nobody_tells_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    found = describe_machine(make_root(tmp_path, **files))
    unknown = "load cpu_quota memory_total memory_available governor huge_pages"
    assert [getattr(found, name) for name in unknown.split()] == [None] * 6
    assert found.instructions == ()
    assert found.cores >= 1


def test_this_machine() -> None:
    found = describe_machine()
    assert isinstance(found, Machine)
    assert found.threads >= 1
    kernels = describe_kernels()
    assert (kernels.problem is None) == (kernels.level is not None)
    assert kernels.level is None or kernels.level in kernels.levels
