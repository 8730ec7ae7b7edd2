"""The kernels of this CPU against plain loops, with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.cpus import instructions

FOLDER = Path(__file__).parent.parent.parent / "kernels"
SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler"),
]


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of kernels/tests. It prints the names of this CPU's kernels for BF16, the fastest first."""
    folder = tmp_path_factory.mktemp("fuzz")
    flags = f"-DCMAKE_CXX_FLAGS={SANITIZED}"
    configure = ["cmake", "-S", str(FOLDER), "-B", str(folder), "-DBEI_TESTS=ON", flags]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    return folder / "fuzz"


def test_every_kernel_gives_what_plain_loops_give(fuzz: Path) -> None:
    found = subprocess.run([fuzz, "0", "120"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.split()[-1] == "portable"


@pytest.mark.skipif("amx_bf16" not in instructions(), reason="this CPU has no tiles of BF16")
def test_tiles_are_used_where_the_system_lets_a_process_use_them(fuzz: Path) -> None:
    assert names(fuzz)[:2] == ["amx_bf16", "avx512_bf16"]
    refused = subprocess.run([fuzz, "0", "0"], capture_output=True, text=True, check=True, preexec_fn=refuse_tiles)
    assert refused.stdout.split() == names(fuzz)[1:]


def names(fuzz: Path) -> list[str]:
    return subprocess.run([fuzz, "0", "0"], capture_output=True, text=True, check=True).stdout.split()


def refuse_tiles() -> None:
    """Let arch_prctl(ARCH_REQ_XCOMP_PERM) fail in this process and those that it becomes, as an older Linux does."""
    arch_prctl, request, einval = 158, 0x1023, 22
    of_call, of_argument = 0, 16  # offsets in seccomp_data: the call's number, its first argument's lower half
    load, jump_if_equal, give = 0x20, 0x15, 0x06  # BPF
    program = [
        (load, 0, 0, of_call),
        (jump_if_equal, 0, 3, arch_prctl),
        (load, 0, 0, of_argument),
        (jump_if_equal, 0, 1, request),
        (give, 0, 0, 0x00050000 | einval),  # SECCOMP_RET_ERRNO
        (give, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filtered = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    for option in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, by_filter, filtered, 0, 0)):
        if libc.prctl(*option):
            raise OSError(ctypes.get_errno(), "prctl")
