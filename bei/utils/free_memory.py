"""Memory still available to this process."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Available bytes of the system, limited by the container's memory limit (cgroup 2 or 1); None: unknown."""
    known = [size for size in (_of_system(meminfo), _of_container(cgroup)) if size is not None]
    return min(known, default=None)


def _of_system(meminfo: Path) -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """The unused part of the container's limit. Cached files do not count as used: the kernel drops them first."""
    if (cgroup / "memory.max").is_file():
        folder, limit, used, cached = cgroup, "memory.max", "memory.current", "file"
    else:
        folder, limit, used, cached = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        in_use = int((folder / used).read_text()) - int(rows[cached])
        return max(0, int((folder / limit).read_text()) - in_use)
    except (OSError, ValueError, LookupError):  # no such file, or "max"
        return None
