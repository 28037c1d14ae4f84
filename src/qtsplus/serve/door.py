"""
Which videos and images a request to vLLM's server may name, and which addresses are fetched for it: [`Door`].

vllm/server.py asks it for all media; `--allow-media-root` and `--allow-media-domain` of cli/serve.py set it. Nothing
else that serves fetches anything: visitors of the page upload their video, and agents name videos of a library. What
commands and Python calls fetch is in model/addresses_qtsplus.py.
"""

import http.client
import ipaddress
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..model.addresses_qtsplus import ADDRESS_TIMEOUT, fetch, is_address, is_inline, parse_address, shown_name
from ..model.containers_qtsplus import open_file

OPEN_FILES = Path("/proc/self/fd")  # on Linux, where a process finds the files that it has opened
_PORTS = {"http": ":80", "https": ":443"}  # the ports of addresses that state none
_PUBLIC_6 = ipaddress.ip_network("2000::/3")  # the one range of IPv6 in which addresses are public
# Addresses that `is_global` of some versions of Python takes for public: IETF's protocols, and the relays of 6to4.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
]


@dataclass(frozen=True)
class Door:
    """
    Which videos a request may name: in the request itself (`data:`), in a folder (`file:///...`), or at some hosts.

    A domain is `host:port`, or a host whose default port is meant. Its name has to lead to a public address, unless the
    domain is localhost or an IP address.
    """

    media_root: Path | None = None
    domains: Sequence[str] = ()

    @contextmanager
    def place(self, url: str) -> Iterator[str]:
        """
        The video as the processor takes it, until the context ends. A file is opened once, and the open file is handed
        on, so swapping a folder for a link meanwhile has no effect. A video at an address is fetched.

        Raises:
            ValueError: a video that may not be read or is not there; any file on a system other than Linux.
        """
        if is_inline(url):
            yield url
        elif is_address(url):
            with self._fetched(url) as path:
                yield path
        else:
            with self._opened(url) as path:
                yield path

    @contextmanager
    def _fetched(self, url: str) -> Iterator[str]:
        request = parse_address(url)
        default_port = _PORTS[request.type]
        host = request.host.removesuffix(default_port)
        if host not in self.domains and host + default_port not in self.domains:
            raise _refused(url)
        with tempfile.NamedTemporaryFile(prefix="qtsplus-") as file:
            fetch(url, file, _connect)
            file.flush()
            yield file.name

    @contextmanager
    def _opened(self, url: str) -> Iterator[str]:
        parts = urlsplit(url)
        path = unquote(parts.path)
        is_local = parts.scheme == "file" and parts.netloc in ("", "localhost")
        if self.media_root is None or not is_local:
            raise _refused(url)
        if not OPEN_FILES.is_dir():
            raise ValueError("This system does not say where an open file is; expected a video as data: or http(s).")
        try:
            file = open_file(path)  # the open file is checked below, since somebody may swap the path at any time
        except (OSError, ValueError) as error:
            raise _refused(url) from error
        with file:
            opened = OPEN_FILES / str(file.fileno())
            if not Path(os.readlink(opened)).is_relative_to(os.path.realpath(self.media_root)):
                raise _refused(url)
            yield str(opened)


def _refused(url: str) -> ValueError:
    return ValueError(
        f"The video {shown_name(url)[:200]!r} may not be read: expected data:video/mp4;base64,..., or what the "
        "server allows with --allow-media-root (as file:///...) or --allow-media-domain."
    )


def _connect(connection: http.client.HTTPConnection) -> socket.socket:
    """A socket to the host that a connection names; refuses a name that leads to an address that is not public."""
    host = connection.host
    opened = socket.create_connection((host, connection.port), ADDRESS_TIMEOUT)
    address = opened.getpeername()[0]
    if host not in ("localhost", address) and not _is_public(address):
        opened.close()
        raise ConnectionRefusedError(
            "its name leads to an address that is not public; --allow-media-domain may name that address itself"
        )
    if isinstance(connection, http.client.HTTPSConnection):
        return ssl.create_default_context().wrap_socket(opened, server_hostname=host)
    return opened


def _is_public(text: str) -> bool:
    """Whether an address is one of the public Internet, by IANA's registries of special-purpose addresses."""
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    if not address.is_global or address.is_multicast:
        return False
    is_special = any(address in network for network in _NOT_PUBLIC)
    return not is_special and (address.version == 4 or address in _PUBLIC_6)
