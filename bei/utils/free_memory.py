"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that the system can give this process, within its container's limit (cgroup 2 or 1); None: not known."""
    known = [size for size in (_of_system(meminfo), _of_container(cgroup)) if size is not None]
    return min(known, default=None)


def _of_system(meminfo: Path) -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """What is left of the limit; cached files do not count, since the kernel drops them first."""
    if (cgroup / "memory.max").is_file():
        folder, limit, used, cached = cgroup, "memory.max", "memory.current", "file"
    else:
        folder, limit, used, cached = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        in_use = int((folder / used).read_text()) - int(rows[cached])
        return max(0, int((folder / limit).read_text()) - in_use)
    except (OSError, ValueError, LookupError):  # no such files, or "max"
        return None
