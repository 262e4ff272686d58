"""Facts out of a made-up ``/proc`` and ``/sys``.

Bytes and operations of a forward, counted anew from tensors and row by row.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.backends.rows.reference import ReferenceOps
from paceline.cache.memory_needs import bytes_per_block
from paceline.core.machine import cpu_quota, memory
from paceline.models.layer_sizes import Experts
from paceline.models.threads import within_quota
from paceline.profiling import machine
from paceline.profiling.machine import (
    Machine,
    Work,
    describe_kernels,
    describe_machine,
    measure_roofs,
)
from tests.toy import TOY, toy_tensors


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


MATRICES = sum(t.numel() for t in toy_tensors().values() if t.dim() == 2)
"""The embedding among them, which is the head too."""


def test_weights_are_those_of_the_tensors() -> None:
    work = Work.of(TOY, "float32", "bfloat16")
    assert work.weights == MATRICES
    assert work.weight_bytes == 4 * MATRICES
    assert Work.of(TOY, "int8", "float32").weight_bytes == MATRICES * 34 // 32
    assert Work.of(TOY, "file", "float32", 12345).weight_bytes == 12345
    kv = TOY.num_layers * 2 * TOY.num_kv_heads * TOY.head_dim * 2
    assert work.bytes_read(3, 10) == 4 * MATRICES + 13 * kv


def test_a_head_in_8_bits_has_a_scale_for_each_group() -> None:
    wide = replace(TOY, head_dim=80)  # three groups of 32
    per_head = 80 + 3 * 2
    assert Work.of(wide, "int8", "int8").kv_bytes == 2 * TOY.num_kv_heads * per_head
    block = 16 * TOY.num_layers * 2 * TOY.num_kv_heads * per_head
    assert bytes_per_block(wide, "int8") == block


@pytest.mark.parametrize("window", [0, 6])
def test_operations_row_by_row(window: int) -> None:
    config = TOY.with_traits(
        {
            "attention.sliding_window": window,
            "attention.sliding_layers": (True, False) if window else (),
        }
    )
    work = Work.of(config, "float32", "float32")
    width, context = 5, 4
    expected = 2 * MATRICES * width
    for layer in range(config.num_layers):
        for row in range(width):
            keys = list(range(context + row + 1))
            if config.attention.is_sliding(layer):
                keys = [p for p in keys if context + row - p < window]
            # A dot product with each key, and each value weighed and added.
            expected += len(keys) * config.num_heads * config.head_dim * 4
    assert work.operations(width, context) == expected


def test_of_a_mixture_the_experts_that_were_chosen_count() -> None:
    """Two of eight experts a row; three rows may read from two experts of a layer to six."""
    mixture = TOY.with_traits({"mlp.experts": Experts(8, 2, 24)})
    work, dense = Work.of(mixture, "float32", "float32"), Work.of(TOY, "float32", "float32")
    kv = dense.bytes_read(3, 10) - dense.weight_bytes
    expert = 3 * TOY.hidden_size * 24
    others = work.weights - TOY.num_layers * 8 * expert
    assert work.bytes_read(3, 10, experts=7) == pytest.approx(4 * (others + 7 * expert) + kv, abs=1)
    assert work.bytes_read(3, 10, TOY.num_layers * 8) == work.weight_bytes + kv
    attended = dense.operations(3, 10) - 2 * dense.weights * 3
    active = others + TOY.num_layers * 2 * expert
    assert work.operations(3, 10) == 2 * active * 3 + attended


def test_a_window_is_read_once() -> None:
    config = TOY.with_traits({"attention.sliding_window": 6})
    work = Work.of(config, "int8", "float32")
    far, farther = work.bytes_read(2, 100), work.bytes_read(2, 200)
    assert far == farther == MATRICES * 34 // 32 + 8 * TOY.num_layers * 2 * TOY.num_kv_heads * 8 * 4


def test_roofs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "GEMM_WIDTH", 64)
    roofs = measure_roofs(ReferenceOps("float32"))
    assert 0.01 < roofs.read_gb_per_s < 1e5
    assert 0.01 < roofs.gflop_per_s < 1e6
