"""Check that the next part of a build fits into memory."""

from __future__ import annotations

from bei.errors import VerificationError
from bei.utils.free_memory import available_bytes as available_bytes


def require(size: int, what: str) -> None:
    """Raise VerificationError where ``what`` would take more memory than is available: the system would kill the
    build."""
    available = available_bytes()
    if available is not None and size > available:
        raise VerificationError(
            f"{what} takes {size / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available. Build on a "
            "larger machine, or with --no-verify: the certificate then says that nothing was compared."
        )
