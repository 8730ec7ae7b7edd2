"""The one way in which an artifact is opened before an engine of it runs, for ``bei serve`` and ``bei tune``."""

from __future__ import annotations

import logging
from pathlib import Path

from bei.artifact import store
from bei.artifact.manifest import Artifact
from bei.artifact.signature import check_trusted
from bei.artifact.signing_keys import trusted_keys
from bei.config.settings import ServeConfig

log = logging.getLogger(__name__)


def opened(source: Path | Artifact, config: ServeConfig) -> Artifact:
    """The artifact at ``source``, verified, and signed by a trusted key where ``config`` requires it. Its files are
    held: what was hashed is what runs.

    Where a signature is required, whoever may write to the files must not decide what runs: they are sealed copies.
    Elsewhere he could as well put another artifact there, and copies would defend nothing. One whose files are held, as
    the cache's are, is not hashed again. Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError.
    """
    trusted = None if config.require_signature is None else trusted_keys(config.require_signature)
    if isinstance(source, Artifact) and source.files is not None and trusted is None:
        artifact = source
    else:
        path = source.path if isinstance(source, Artifact) else source
        artifact = store.load(path, sealed=trusted is not None)
    name, signed = artifact.manifest.name, artifact.signed
    if trusted is not None:
        check_trusted(artifact.path, signed, trusted)
    if signed is not None and signed.is_checked:
        log.info("%s: signed by %s%s", name, signed.key, ", which is trusted" if trusted else "; no key is required")
    elif signed is not None:
        log.warning(
            "%s: that %s has signed it is not checked, as cryptography is not installed: pip install 'bei[sign]'",
            name,
            signed.key,
        )
    return artifact
