"""The plan of a job: all that its output depends on. Written once; whoever works on the job has the same one."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from bei.bulk.input_check import FLAGS_OF_TEXTS
from bei.bulk.sources.rows import Columns
from bei.bulk.sources.source import Contents, InputFile
from bei.utils.differences import differences, flag_of
from bei.version import __version__

# Of the flags in /proc/cpuinfo those that engines choose their instructions by.
_INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_INSTRUCTIONS_OF_ARM = ("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2")
_OF_TARGETS: Mapping[str, str] = {
    **{"cpu": "openvino", "cuda": "torch", "cuda-twin": "torch", "trtllm": "tensorrt-llm"},
    **{"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_cu13_libs"},
}
# CPU engines use it where it is installed.
_KERNELS = "bei-kernels-cpu"
_FLAGS_OF_COLUMNS: Mapping[str, str] = {
    **{"text": "--text-column", "query": "--query-column", "id": "--id-column", "image": "--image-column"},
    "carried": "--columns",
}


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``artifact``: the digest of the manifest, which has those of all files. ``options``: of the task and of the
    output, by the names of their flags. ``versions`` and ``machine``: engines and formats write other bytes with
    others."""

    contents: Contents
    columns: Columns
    artifact: str
    task: str
    options: dict[str, Any]
    versions: dict[str, str]
    machine: str

    @property
    def digest(self) -> str:
        """SHA-256 of all but the stamps of files."""
        files = [msgspec.structs.replace(file, stamp="") for file in self.contents.files]
        lasting = msgspec.structs.replace(self, contents=msgspec.structs.replace(self.contents, files=files))
        return hashlib.sha256(msgspec.json.encode(lasting, order="deterministic")).hexdigest()

    def differences(self, other: JobPlan) -> Iterator[str]:
        """What differs in ``other``, in words: at least one thing where the digests do."""
        found = [*self._differences(other)]
        yield from found or ["the bounds of its shards"]

    def _differences(self, other: JobPlan) -> Iterator[str]:
        size, now = self.contents.size, other.contents.size
        # What was hashed of the files depends on both.
        is_hashed_alike = (self.columns, size.max_rows) == (other.columns, now.max_rows)
        yield from _differing_files(self.contents.files, other.contents.files, are_hashed_alike=is_hashed_alike)
        if self.artifact != other.artifact:
            yield f"the model (artifact {self.artifact[:12]}, now {other.artifact[:12]})"
        yield from differences({"task": self.task, **self.options}, {"task": other.task, **other.options}, _flag)
        before, after = (msgspec.structs.asdict(plan.columns) for plan in (self, other))
        yield from differences(before, after, _FLAGS_OF_COLUMNS.__getitem__)
        yield from differences(self.versions, other.versions, "the version of {}".format)
        if self.machine != other.machine:
            yield (
                f"the machine's instructions ({self.machine}, now {other.machine}), which decide how vectors are "
                "rounded: go on on a machine with the former ones, or begin anew elsewhere on machines with these alone"
            )
        if self.columns == other.columns and self.contents.schema != other.contents.schema:
            yield "the types of columns"
        elif size.rows != now.rows:
            yield f"the rows of a shard ({size.rows}, now {now.rows})"


def versions_for(target: str, *packages: str | None) -> dict[str, str]:
    """The versions that the bytes of an output depend on. ``packages``: those of its format and of its input."""
    names = ["numpy", "pyarrow", "tokenizers", *filter(None, (_OF_TARGETS.get(target), *packages))]
    found = {"bei": __version__, **{name: _version(name) or "unknown" for name in names}}
    kernels = _version(_KERNELS) if target == "cpu" else None
    return {**found, _KERNELS: kernels} if kernels else found


def machine_for(target: str, device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A CPU's instruction set, or the name of the device."""
    if target != "cpu":
        return device
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    known = _INSTRUCTIONS_OF_ARM if platform.machine() == "aarch64" else _INSTRUCTIONS
    return " ".join((platform.machine(), *(name for name in known if name in flags)))


def _flag(name: str) -> str:
    """The flag that gives an option of the plan."""
    return FLAGS_OF_TEXTS.get(name) or flag_of(name)


def _differing_files(files: list[InputFile], others: list[InputFile], *, are_hashed_alike: bool) -> Iterator[str]:
    before, now = ({file.name: file for file in given} for given in (files, others))
    both = sorted(before.keys() & now.keys())
    changed = [name for name in both if are_hashed_alike and before[name].digest != now[name].digest]
    # Rows may be added behind those that --max-rows asks for.
    sizes = [
        f"{name}, {before[name].size:,} bytes, now {now[name].size:,}"
        for name in both
        if name not in changed and before[name].size != now[name].size
    ]
    gone, new = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    for names, text in ((gone, "missing"), (new, "new"), (changed, "changed"), (sizes, "grown or cut")):
        if names:
            yield f"the input ({text}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''})"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
