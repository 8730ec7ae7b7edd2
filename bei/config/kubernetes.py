"""Recognizes the environment variables that Kubernetes injects for each Service of a namespace (and Docker for links).

A Service called ``bei-embed`` with a port 80 called ``http`` gives

    BEI_EMBED_SERVICE_HOST=10.0.0.1    BEI_EMBED_PORT=tcp://10.0.0.1:80
    BEI_EMBED_SERVICE_PORT=80          BEI_EMBED_PORT_80_TCP=tcp://10.0.0.1:80
    BEI_EMBED_SERVICE_PORT_HTTP=80     BEI_EMBED_PORT_80_TCP_PROTO=tcp, _PORT=80, _ADDR=10.0.0.1

A Service called ``bei`` gives names that are also settings. Name and value together decide: a variable counts as
injected only if the Service's address is there too and the variable refers to the same address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

_SERVICE = r"(BEI(?:_[A-Z0-9_]+)?)"
_LINK = re.compile(r"(tcp|udp|sctp)://(.+):(\d{1,5})")
_PORT_OF_LINK = re.compile(r"PORT_(\d{1,5})_(TCP|UDP|SCTP)(?:_(PROTO|PORT|ADDR))?")


def injected(env: Mapping[str, str]) -> dict[str, list[str]]:
    """The injected variables in ``env``, by Service (``BEI_EMBED``), sorted by name."""
    found: dict[str, list[str]] = {}
    for service, address in sorted(_services(env).items()):
        start = f"{service}_"
        found[service] = sorted(
            name for name, value in env.items() if name.startswith(start) and _fits(name[len(start) :], value, address)
        )
    return found


def _services(env: Mapping[str, str]) -> dict[str, str]:
    """The address of each Service, from its HOST variable, or from Docker's link if there is none."""
    hosts, links = {}, {}
    for name, value in env.items():
        if (host := re.fullmatch(rf"{_SERVICE}_SERVICE_HOST", name)) and _is_address(value):
            hosts[host[1]] = value
        elif (port := re.fullmatch(rf"{_SERVICE}_PORT", name)) and (link := _link(value)):
            links[port[1]] = link[1]
    return links | hosts


def _fits(name: str, value: str, address: str) -> bool:
    """True if the variable ``name`` (without its Service) has a value that a Service at ``address`` gives."""
    if name == "SERVICE_HOST":
        return value == address
    if re.fullmatch(r"SERVICE_PORT(_[A-Z0-9_]+)?", name):
        return _is_port(value)
    link = _link(value)
    if name == "PORT":
        return link is not None and link[1] == address
    if not (parts := _PORT_OF_LINK.fullmatch(name)):
        return False
    number, protocol, kind = parts[1], parts[2].lower(), parts[3]
    if kind is None:
        return link == (protocol, address, number)
    return value == {"PROTO": protocol, "PORT": number, "ADDR": address}[kind]


def _link(value: str) -> tuple[str, str, str] | None:
    """Protocol, address and port of ``tcp://10.0.0.1:80`` or ``tcp://[fd00::1]:80``; None for other text."""
    found = _LINK.fullmatch(value)
    if not found:
        return None
    host = found[2]
    address = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return (found[1], address, found[3]) if _is_address(address) and _is_port(found[3]) else None


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", value) is not None and 1 <= int(value) <= 65535
