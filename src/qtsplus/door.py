"""Whose requests come in, which videos they may name, and how one is fetched: from the very host that was checked."""

import http.client
import ipaddress
import os
import secrets
import socket
import ssl
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .decoding_qtsplus import ADDRESS_TIMEOUT, is_address, is_inline, parse_address, receive, shown_name

ARRIVAL_SECONDS = 120.0  # in which a request over HTTP has to arrive whole
MAX_ADDRESS = 8192  # characters of one that is fetched or of a file; a signed one has about 2,000
# Of IPv6, what leads on to an address of IPv4: 6to4, NAT64.
_TUNNELS = [ipaddress.ip_network(network) for network in ("2002::/16", "64:ff9b::/96", "64:ff9b:1::/48")]


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
            connection = kind(request.host, timeout=ADDRESS_TIMEOUT)
            if self._allows(connection):
                descriptor, path = tempfile.mkstemp(dir=folder)
                with open(descriptor, "wb") as file:
                    receive(shown_name(url), partial(_ask, connection, request), file)
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


def _ask(connection: http.client.HTTPConnection, request: urllib.request.Request) -> http.client.HTTPResponse:
    """The answer of the host that a connection names, without redirects and proxies, which could lead elsewhere."""
    host = connection.host
    found = socket.getaddrinfo(host, connection.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    if host != "localhost" and addresses != [host] and not all(map(_is_public, addresses)):
        raise ConnectionRefusedError(
            "its name leads to an address that is not public; --allow-media-domain may name that address itself"
        )
    # Connected to as they were checked: asked again, the name could lead elsewhere.
    for address in addresses:
        try:
            opened = socket.create_connection((address, connection.port), connection.timeout)
            break
        except OSError as error:
            failed = error
    else:
        raise failed
    if request.type == "https":
        opened = ssl.create_default_context().wrap_socket(opened, server_hostname=host)
    connection.sock = opened
    connection.request("GET", request.selector, headers={"Connection": "close", **request.unredirected_hdrs})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise http.client.HTTPException(f"{response.status} {response.reason}")
    return response


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    tunnelled = any(address in network for network in _TUNNELS if network.version == address.version)
    return address.is_global and not address.is_multicast and not tunnelled
