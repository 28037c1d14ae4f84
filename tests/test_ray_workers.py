"""An address where no Ray cluster answers; what runs on one is tested with `qtsplus batch`."""

import socket
import sys
from types import SimpleNamespace

import pytest

from qtsplus.ray_workers import connect


def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # nobody listens
        with pytest.raises(ValueError, match=f"--ray is '{address}', and no Ray cluster answers there"):
            connect(address)
