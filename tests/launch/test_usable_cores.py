"""`num_actors auto` follows the affinity mask and the cgroup quota, not the host's core count."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_service.launch.cpu import cgroup_quota, usable_cores


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "membership"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("cpu_max", "affinity", "count"),
    [
        ("200000 100000", 16, 2),
        ("150000 100000", 16, 2),
        ("50000 100000", 16, 1),
        ("max 100000", 16, 16),
        ("800000 100000", 1, 1),
    ],
)
def test_a_v2_quota_is_rounded_up_and_bounded_by_the_affinity(tmp_path: Path, cpu_max: str, affinity: int, count: int):
    (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    assert usable_cores(root=tmp_path, membership=membership(tmp_path, "0::/\n"), affinity=affinity).count == count


def test_the_strictest_ancestor_counts(tmp_path: Path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("800000 100000\n")
    (inner.parent / "cpu.max").write_text("300000 100000\n")
    assert cgroup_quota(root=tmp_path, membership=membership(tmp_path, "0::/outer/inner\n")) == (3.0, "cgroup v2")


def test_a_v1_quota_is_found_and_minus_one_means_none(tmp_path: Path):
    group = tmp_path / "cpu" / "job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("250000\n")
    listing = membership(tmp_path, "4:memory:/job\n3:cpu,cpuacct:/job\n")
    decision = usable_cores(root=tmp_path, membership=listing, affinity=8)
    assert (decision.count, "cgroup v1" in decision.reason) == (3, True)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(root=tmp_path, membership=listing, affinity=8).count == 8


def test_no_cgroup_files_leave_the_affinity(tmp_path: Path):
    decision = usable_cores(root=tmp_path / "nowhere", membership=tmp_path / "none", affinity=5)
    assert (decision.count, decision.reason) == (5, "5 in the affinity mask, no cgroup quota")
