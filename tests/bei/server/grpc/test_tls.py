"""TLS on the port of gRPC: the certificates of HTTP, and their reloads."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import grpc

from bei.engine.fake import FakeEngine
from tests.bei.server.conftest import MakeApp
from tests.bei.server.grpc.served import Serve, tei
from tests.support.artifacts import LIMITS
from tests.support.tls_certificates import make_authority, make_certificate

EMBED = "/tei.v1.Embed/Embed"


def test_tls(make_app: MakeApp, serve: Serve, tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, "server", authority)
    settings = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    served = serve(make_app(FakeEngine(LIMITS)), credentials=credentials, **settings)
    assert served.call(EMBED, tei("EmbedRequest", inputs="cat"))[0].embeddings


def test_a_reload_of_tls_gives_what_it_has_checked_and_not_what_lies_there_later(
    make_app: MakeApp, serve: Serve, tmp_path: Path
) -> None:
    authority = make_authority(tmp_path)
    pair, second, third = (make_certificate(tmp_path, name, authority) for name in ("server", "second", "third"))
    app = make_app(FakeEngine(LIMITS))
    served = serve(app, tls_cert=str(pair.cert), tls_key=str(pair.key))
    tls = served.server._tls
    assert tls is not None

    def shown() -> str:
        """The certificate that a new connection gets."""
        address = "127.0.0.1", served.server.port
        found: str = app.run(asyncio.to_thread(ssl.get_server_certificate, address))
        return found.strip()

    assert shown() == pair.cert.read_text().strip()
    shutil.copy(second.cert, pair.cert)
    shutil.copy(second.key, pair.key)
    app.run(tls.reload())
    shutil.copy(third.cert, pair.cert)  # half of the next renewal
    pair.key.unlink()
    assert shown() == second.cert.read_text().strip()
    app.run(tls.reload())  # which fails
    assert shown() == second.cert.read_text().strip()
    shutil.copy(third.key, pair.key)
    app.run(tls.reload())
    assert shown() == third.cert.read_text().strip()
