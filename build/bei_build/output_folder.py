"""The folder that a build writes: a scratch folder beside its place, renamed when it is whole.

While it is written, there is a lock file beside it: what a killed process has left of a build of the same place is
known by that nobody holds it, and removed by the next one. (A file in the folder would be renamed by NFS when it is
removed while it is open, and listed in the manifest.)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bei.artifact.certificate.record import Certificate
from bei.artifact.certificate_faults import certificate_fault
from bei.artifact.manifest import MANIFEST, Artifact, Manifest
from bei.artifact.signature import SIGNATURE
from bei.artifact.store import save, sign
from bei.artifact.validation import manifest_fault, name_fault
from bei.errors import BuildError, ConfigError
from bei.utils.file_lock import acquire, try_acquire
from bei.utils.full_disk import full_disk, naming_full_disk
from bei.utils.units import shown_size
from bei.utils.untrusted_files import home_expanded, read_bounded
from bei_build.checkpoint.locate import Location
from bei_build.config import BuildConfig
from bei_build.progress import Progress

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LOCK, _REPLACED = ".lock", ".replaced"  # ends of names, behind the folder's
# The age from which a lock file that nobody holds is left over: a build creates it and then locks it.
_LEFT_AFTER_S = 60.0


def output_folder(config: BuildConfig, location: Location, precision: str, progress: Progress) -> Path:
    """The folder of the artifact, as it is asked for, or by the checkpoint's name. Raises ConfigError if something else
    than an artifact lies there."""
    name = location.name.replace("/", "--")
    out = home_expanded(config.out or f"{name}-{config.target}-{precision}").resolve()
    _check_replaceable(out)
    if config.sign is None and (out / SIGNATURE).exists():
        progress.note(
            f"{out} is signed, and what replaces it will not be: sign it again with 'bei sign', or build with --sign"
        )
    return out


def check_outside_artifacts(config: BuildConfig) -> None:
    """Raise ConfigError where the artifact would lie in another one, whose manifest does not list its files."""
    out = home_expanded(config.out or "artifact").resolve()
    if (outer := next((folder for folder in out.parents if _is_ours(folder)), None)) is not None:
        raise ConfigError(
            f"{outer} is an artifact, which would be damaged by another one in it: choose an --out beside it."
        )


def check_names(config: BuildConfig, location: Location) -> None:
    """Raise ConfigError for names that cannot be written into a manifest, or displayed."""
    if fault := name_fault(location.model):
        raise ConfigError(f"The checkpoint's name cannot be kept ({fault}): rename its folder.")
    if config.name is not None and (fault := name_fault(config.name)):
        raise ConfigError(f"--name: {fault}.")


@contextmanager
def scratch_folder(out: Path, progress: Progress) -> Iterator[Path]:
    """A new folder beside ``out``, removed if the block fails, after those that killed builds of ``out`` have left.
    Raises DiskFullError where the disk is full, ConfigError where nothing can be written, or ``out`` not be replaced.
    """
    if out.is_mount():  # its parent is often read-only, which would be said
        raise _mounted(out)
    try:
        with naming_full_disk(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(out, progress)
            scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(
            f"No artifact can be written into {out.parent} ({error.strerror or error}): choose another --out."
        ) from error
    lock = scratch.with_name(scratch.name + _LOCK)
    try:
        with _held(lock):
            _check_movable(out, scratch)
            yield scratch
    except BaseException as error:  # raised again: whatever ends the build, nothing of it stays
        full = full_disk(error, out.parent)  # before space is freed
        shutil.rmtree(scratch, ignore_errors=True)
        if full is not None:
            raise full from error
        raise
    finally:
        lock.unlink(missing_ok=True)


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Hold ``lock``; on a file system without locks there is no file, and what a killed build leaves stays."""
    with ExitStack() as stack:
        try:
            stack.enter_context(acquire(lock))
        except OSError:
            lock.unlink(missing_ok=True)
        yield


def seal(
    scratch: Path,
    out: Path,
    manifest: Manifest,
    certificate: Certificate,
    key: Ed25519PrivateKey | None,
    progress: Progress,
) -> Artifact:
    """Complete the artifact in ``scratch``, sign it if there is a ``key``, and put it in place. Raises BuildError."""
    with progress.step("Write artifact") as step:
        artifact = save(scratch, manifest, certificate)
        if fault := manifest_fault(artifact.manifest) or certificate_fault(artifact.manifest, certificate):
            raise BuildError(f"No server would load this artifact: {fault}. Correct the checkpoint's files.")
        if key is not None:
            artifact = sign(artifact, key)
        if (left := _put_in_place(scratch, out)) is not None:
            progress.note(f"{left}, which was in its place before, cannot be removed now: remove it")
        step.details.append(shown_size(size_of(out)))
        if artifact.signed is not None:
            step.details.append(f"signed by {artifact.signed.key}")
    return msgspec.structs.replace(artifact, path=out)


def size_of(folder: Path) -> int:
    """Bytes of all files of ``folder``."""
    if not folder.is_dir():
        raise BuildError(f"{folder} was not written. This is a bug.")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _put_in_place(scratch: Path, out: Path) -> Path | None:
    """Rename; an existing artifact is moved aside first, so that a crash between the two renames loses neither. Of two
    builds that end at once the later one stays. Where the former cannot be removed (NFS keeps files that a server has
    open), the folder that is left."""
    scratch.chmod(0o755)  # mkdtemp gives 0700
    replaced = scratch.with_name(scratch.name + _REPLACED)
    try:
        while not _renamed(scratch, out):
            _check_replaceable(out)  # again, because the build took a while
            shutil.rmtree(replaced, ignore_errors=True)
            with suppress(FileNotFoundError):  # another build has moved it aside
                out.rename(replaced)
    except BaseException:
        with suppress(OSError):  # nothing was moved aside, or another build's is there
            replaced.rename(out)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return replaced if replaced.exists() else None


def _renamed(scratch: Path, out: Path) -> bool:
    """Rename ``scratch`` to ``out``; False: something is there."""
    try:
        scratch.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True


def _remove_leftovers(out: Path, progress: Progress) -> None:
    """Remove the scratch folders of builds of ``out`` that were killed. What they had moved aside is put back where
    they were killed before something else was in its place, also where there was no lock."""
    of_builds = re.compile(
        rf"(\.{re.escape(out.name)}\.[a-z0-9_]{{8}})({re.escape(_LOCK)}|{re.escape(_REPLACED)})"
    )  # mkdtemp's names
    for path in sorted(out.parent.iterdir()):  # locks before what was moved aside under them
        if (found := of_builds.fullmatch(path.name)) is None:
            continue
        if found[2] == _REPLACED:
            with suppress(OSError):
                is_left = time.time() - path.stat().st_ctime > _LEFT_AFTER_S  # the time of the rename
                if is_left and _is_ours(path) and not path.with_name(found[1] + _LOCK).exists():
                    _put_back(path, out, progress)
            continue
        try:
            is_old = time.time() - path.stat().st_mtime > _LEFT_AFTER_S
            lock = try_acquire(path, create=False) if is_old else None
        except OSError:  # another user's, or just removed
            continue
        if lock is not None:
            with lock, suppress(OSError):
                _put_back(path.with_name(found[1] + _REPLACED), out, progress)
                shutil.rmtree(path.with_name(found[1]), ignore_errors=True)
                path.unlink(missing_ok=True)


def _put_back(replaced: Path, out: Path, progress: Progress) -> None:
    """Of a killed build: ``replaced``, if it is there, is ``out`` again, or is removed where ``out`` is there. Raises
    OSError if it cannot be renamed."""
    if not replaced.exists():
        return
    if _renamed(replaced, out):
        progress.note(f"{out} is the former artifact again: a build was killed before its own was in the place")
    else:
        shutil.rmtree(replaced, ignore_errors=True)


def _check_movable(out: Path, scratch: Path) -> None:
    """Raise ConfigError where the rename at the end of the build would fail.

    ``out`` is asked to take the place of ``scratch``, which holds a file meanwhile: so it stays where it is, and the
    system names what else is in the way.
    """
    held = scratch / "held"
    held.touch()
    try:
        out.rename(scratch)
    except OSError as error:
        if error.errno == errno.EBUSY:  # of a mount from the same device, which looks like a folder
            raise _mounted(out) from error
        # EXDEV: a folder of a lower layer of overlayfs cannot be moved, but be replaced while it is empty.
        is_free = error.errno == errno.EXDEV and not any(out.iterdir())
        if not is_free and error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise ConfigError(f"{out} cannot be replaced ({error.strerror or error}): choose another --out.") from error
    finally:
        held.unlink()


def _mounted(out: Path) -> ConfigError:
    return ConfigError(
        f"{out} is a mount point, which no artifact can replace: choose a folder in it, as --out {out / 'artifact'}."
    )


def _check_replaceable(out: Path) -> None:
    """Raise ConfigError. Another build may move or replace ``out`` meanwhile: what is there no longer says nothing."""
    try:
        before = out.stat()
        is_free = not any(out.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        is_free = False
    if is_free or _is_ours(out):
        return
    with suppress(FileNotFoundError):
        if os.path.samestat(before, out.stat()):
            raise ConfigError(f"{out} exists and is not an artifact; it will not be overwritten. Choose another --out.")


def _is_ours(folder: Path) -> bool:
    """True if bei, in any version, wrote ``folder``: many tools write a manifest.json."""
    try:
        keys = msgspec.json.decode(read_bounded(folder / MANIFEST), type=dict[str, msgspec.Raw]).keys()
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return False
    return {"schema_version", "bei_version"} <= keys
