"""buildah and podman without a daemon and a registry, and the base image from Debian's packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
BASE = "localhost/bei-test-base"

# Packages of Debian, whose commands have the same names.
PACKAGES = ("buildah", "mmdebstrap", "podman", "runc")
RELEASE = "bookworm"
# What Docker's python:3-slim has besides Debian's minimum, and the libraries that Python's modules load.
_INCLUDED = (
    *("ca-certificates", "netbase", "tzdata"),
    *("libbz2-1.0", "libexpat1", "libffi8", "liblzma5", "libncursesw6", "libreadline8", "libsqlite3-0", "libssl3"),
    *("libuuid1", "zlib1g"),
)
_LEFT_OUT = ("doc", "info", "locale", "man")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# A shell script; $1 is the root. What other packages were installed into that Python is left out, as are tests,
# bytecode and symbols, which Docker's image leaves out too. The library's path is that of the place where it was built.
_PYTHON = r"""
set -eu
cp -a {python}/bin {python}/lib "$1/usr/local"
cd "$1/usr/local/lib"
find . -name __pycache__ -prune -exec rm -r {{}} +
find python3*/site-packages -mindepth 1 -maxdepth 1 ! -name 'pip*' -exec rm -r {{}} +
find python3* -maxdepth 1 \( -name test -o -name 'config-*' \) -exec rm -r {{}} +
find . -type f -name '*.so*' -exec strip --strip-unneeded {{}} +
sed -i '1s|^#!.*/python|#!/usr/local/bin/python|' ../bin/pip*
chroot "$1" ldconfig
"""

# No cgroups to manage, no journal, no healthcheck timers; limits that need no capability to be set.
_CONTAINERS = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
_STORAGE = """
[storage]
driver = "{driver}"
graphroot = "{folder}/store"
runroot = "{folder}/run"
"""
_PIP = f"""
[global]
cert = {_CERTIFICATES}
timeout = 180
"""


def python_version() -> str:
    """Of the image that the Dockerfile starts from."""
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)-slim$", DOCKERFILE.read_text("utf-8"), re.M)
    return str(version)


def python_prefix() -> Path | None:
    """pyenv's Python of that version, if there is one."""
    if shutil.which("pyenv") is None:
        return None
    found = subprocess.run(["pyenv", "prefix", python_version()], capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else None


def lack(python: Path | None) -> str:
    """Why images cannot be built here, and what to do about it; empty if they can."""
    if os.geteuid() != 0:
        return "it needs root, to mount file systems and to run containers as other users"
    if lacking := [package for package in PACKAGES if shutil.which(package) is None]:
        return f"it needs Debian's packages: apt-get install --no-install-recommends {' '.join(lacking)}"
    version = python_version()
    if python is None or not (python / "bin" / f"python{version}").exists():
        return f"it needs a Python {version} for the base: pyenv install {version}, or name the folder with --python"
    return ""


class Tools:
    """The commands, with their storage in ``folder``. ``driver``: overlay or vfs."""

    def __init__(self, folder: Path, driver: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for name, text in (("storage.conf", _STORAGE), ("containers.conf", _CONTAINERS), ("pip.conf", _PIP)):
            (folder / name).write_text(text.replace("{folder}", str(folder)).replace("{driver}", driver))
        self._env = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }

    def run(self, *command: object, code: int | None = 0, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. ``code``: what it must end with; None: anything."""
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, timeout=timeout_s, check=False)
        output = f"{done.stdout}{done.stderr}"
        assert code is None or done.returncode == code, f"{' '.join(words)}\nended with {done.returncode}:\n{output}"
        return done

    def make_base(self, python: Path) -> None:
        """``BASE`` in the storage, unless it is there."""
        if self.run("podman", "image", "exists", BASE, code=None).returncode == 0:
            return
        archive = self.folder / "base.tar"
        self.run(
            *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_INCLUDED)}"),
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _LEFT_OUT),
            *("--dpkgopt=path-include=/usr/share/doc/*/copyright", f"--customize-hook={_PYTHON.format(python=python)}"),
            *(RELEASE, archive),
            timeout_s=1800,
        )
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.run("podman", "import", "--change", f"ENV {path}", archive, BASE)
        archive.unlink()

    def build(self, target: str) -> str:
        """Build the Dockerfile's target as it stands, but for its base; the image's name."""
        image = f"localhost/bei-test:{target}"
        self.run(
            # docker: OCI's format has no health check.
            *("buildah", "bud", "--isolation", "chroot", "--format", "docker", "--layers", "--pull-never"),
            *("--network", "host", "--volume", f"{_CERTIFICATES.parent}:{_CERTIFICATES.parent}:ro"),
            *("--volume", f"{self.folder}/pip.conf:/etc/pip.conf:ro", "--build-arg", f"PYTHON_IMAGE={BASE}"),
            *("--target", target, "--tag", image, "--file", DOCKERFILE, ROOT),
            timeout_s=3600,
        )
        return image

    def sizes(self, image: str) -> tuple[int, int]:
        """In bytes: of the files, and of the compressed layers as a registry has them."""
        folder = self.folder / "pushed"
        shutil.rmtree(folder, ignore_errors=True)
        self.run("podman", "push", "--quiet", image, f"oci:{folder}", timeout_s=1800)
        blobs = folder / "blobs" / "sha256"

        def blob(digest: str) -> dict[str, object]:
            return dict(json.loads((blobs / digest.removeprefix("sha256:")).read_text("utf-8")))

        index = json.loads((folder / "index.json").read_text("utf-8"))
        manifest = blob(index["manifests"][0]["digest"])
        layers = manifest["layers"]
        assert isinstance(layers, list)
        compressed = sum(layer["size"] for layer in layers)
        shutil.rmtree(folder)
        (inspected,) = json.loads(self.run("podman", "image", "inspect", image).stdout)
        return inspected["Size"], compressed
