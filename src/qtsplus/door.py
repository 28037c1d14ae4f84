"""Whose requests come in, which videos they may name, and how one is fetched: from the very host that was checked."""

import http.client
import ipaddress
import os
import secrets
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .decoding_qtsplus import ADDRESS_TIMEOUT, fetch, is_address, is_inline, parse_address, shown_name

ARRIVAL_SECONDS = 120.0  # in which a request over HTTP has to arrive whole
MAX_ADDRESS = 8192  # characters of one that is fetched or of a file; a signed one has about 2,000
# What `is_global` of some versions of Python takes for public: IETF's protocols, the relays of 6to4.
_SPECIAL = [ipaddress.ip_network(network) for network in ("192.0.0.0/24", "192.88.99.0/24")]
# IPv6 has public addresses in one range alone, and in there such as lead on (Teredo, 6to4) or are for examples.
_PUBLIC_6 = ipaddress.ip_network("2000::/3")
_SPECIAL_6 = [
    ipaddress.ip_network(network)
    for network in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
]


def is_key(authorization: str, key: str | None) -> bool:
    """Whether a request with this header brings the server's key, if there is one."""
    kind, _, brought = authorization.partition(" ")
    return key is None or (kind.lower() == "bearer" and secrets.compare_digest(brought.encode(), key.encode()))


@dataclass(frozen=True)
class Door:
    """
    Which videos a request may name: those in it (`data:`), in a folder (`file:///...`), at addresses of hosts.

    A domain is a host, of which the default port is open, or `host:port`. Its name has to lead to a public address,
    unless the domain is localhost or an address itself.
    """

    media_root: Path | None = None
    domains: Sequence[str] = ()

    def place(self, url: str, folder: str) -> str:
        """
        The video as the processor takes it; one at an address is fetched into the folder. A `ValueError` for one that
        may not be read, or is not there.
        """
        if is_inline(url):
            return url
        if is_address(url) and len(url) <= MAX_ADDRESS:
            request = parse_address(url)
            kind = http.client.HTTPSConnection if request.type == "https" else http.client.HTTPConnection
            if self._allows(kind(request.host)):
                descriptor, path = tempfile.mkstemp(dir=folder)
                with open(descriptor, "wb") as file:
                    fetch(url, file, _connect)
                return path
        elif self.media_root is not None and len(url) <= MAX_ADDRESS:
            parts = urlsplit(url)
            path = unquote(parts.path)
            # Asked first: it is False, and no error, for what can be no name.
            if parts.scheme == "file" and parts.netloc in ("", "localhost") and os.path.isfile(path):
                path = os.path.realpath(path)
                if Path(path).is_relative_to(os.path.realpath(self.media_root)):
                    return path
        raise ValueError(
            f"The video {shown_name(url)[:200]!r} may not be read: expected data:video/mp4;base64,..., or what the "
            "server allows with --allow-media-root (as file:///...) or --allow-media-domain."
        )

    def _allows(self, connection: http.client.HTTPConnection) -> bool:
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        names = {f"{host}:{connection.port}"} | ({host} if connection.port == connection.default_port else set())
        return not names.isdisjoint(self.domains)


def _connect(connection: http.client.HTTPConnection) -> socket.socket:
    """A socket to the host that a connection names."""
    host = connection.host
    found = socket.getaddrinfo(host, connection.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    if host != "localhost" and addresses != [host] and not all(map(_is_public, addresses)):
        raise ConnectionRefusedError(
            "its name leads to an address that is not public; --allow-media-domain may name that address itself"
        )
    opened = _open(addresses, connection)
    if isinstance(connection, http.client.HTTPSConnection):
        return ssl.create_default_context().wrap_socket(opened, server_hostname=host)
    return opened


def _open(addresses: list[str], connection: http.client.HTTPConnection) -> socket.socket:
    """Connects to the addresses that were checked: asked for again, the name could lead elsewhere."""
    deadline = time.monotonic() + ADDRESS_TIMEOUT
    problem: OSError = TimeoutError("no address of it can be reached in time")
    for address in addresses:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        try:
            opened = socket.create_connection((address, connection.port), seconds)
        except OSError as error:
            problem = error
        else:
            opened.settimeout(ADDRESS_TIMEOUT)
            return opened
    raise problem


def _is_public(text: str) -> bool:
    """Whether an address is one of the public Internet, by IANA's registries of special-purpose addresses."""
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    if not address.is_global or address.is_multicast:
        return False
    if address.version == 4:
        return not any(address in network for network in _SPECIAL)
    return address in _PUBLIC_6 and not any(address in network for network in _SPECIAL_6)
