"""The wheel of kernels/, compiled by this machine's GCC against the C library and the C++ headers of Debian 11.

That is glibc 2.31 and GCC 10, whose own compiler lacks ``__builtin_shufflevector``. Headers decide which symbols a
library asks for: GCC 12's call functions of its own libstdc++ (GLIBCXX_3.4.29), glibc 2.36's have
``__libc_single_threaded`` (GLIBC_2.32). libgcc stays GCC 12's: it is linked in, and knows this year's CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "kernels"
RELEASE = "bullseye"
PLATFORM = "manylinux_2_28_x86_64"  # OpenVINO's own; auditwheel refuses a library that asks for more
OF_OPENVINO = ("libopenvino.so.*", "libtbb.so.*")  # loaded where the extension is


def make_sysroot(folder: Path) -> Path:
    """Debian 11's packages for compiling, extracted into ``folder`` unless they are there, and not installed."""
    if not folder.exists():
        packages = "--include=libc6-dev,libstdc++-10-dev"
        _run("mmdebstrap", "--quiet", "--variant=extract", packages, RELEASE, folder)
        for link in folder.rglob("*.so*"):  # absolute ones lead to this machine's libraries
            if link.is_symlink() and link.readlink().is_absolute():
                target = folder / link.readlink().relative_to("/")
                link.unlink()
                link.symlink_to(target)
    return folder


def build_wheel(sysroot: Path, folder: Path) -> Path:
    """The wheel in ``folder``, named after the oldest systems that it fits."""
    plain = folder / "plain"
    pip = (sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", plain, FOLDER)
    _run(*pip, env=_flags(sysroot))
    (built,) = plain.glob("*.whl")
    excluded = [word for name in OF_OPENVINO for word in ("--exclude", name)]
    _run(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, *excluded, "--wheel-dir", folder, built)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_fuzz(sysroot: Path, folder: Path) -> Path:
    """The program of kernels/tests, compiled like the wheel."""
    _run("cmake", "-S", FOLDER, "-B", folder, "-DBEI_TESTS=ON", env=_flags(sysroot))
    _run("cmake", "--build", folder)
    return folder / "fuzz"


def _flags(sysroot: Path) -> dict[str, str]:
    """What CMake reads from the environment."""
    (headers,) = sysroot.glob("usr/include/c++/*")
    (machine,) = sysroot.glob("usr/include/*-linux-gnu/c++/*")
    found = f"--sysroot={sysroot}"
    # GCC looks beside its own libraries first, where this machine's libc lies.
    libraries = " ".join(f"-L{folder}" for folder in sorted(sysroot.glob("usr/lib/*-linux-gnu")))
    return {
        "CXXFLAGS": f"{found} -nostdinc++ -isystem {headers} -isystem {machine}",
        # GCC 12's libstdc++ is linked, whose older symbols are meant, and wants a newer libc.
        "LDFLAGS": f"{found} {libraries} -Wl,--allow-shlib-undefined",
    }


def _run(*command: object, env: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    subprocess.run(words, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=True)
