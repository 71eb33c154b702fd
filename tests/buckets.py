"""A bucket on loopback, for the tests of object stores; ``conftest`` makes its fixtures of it."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from functools import cache

import pytest

from holdfast.store.object_store import Url


def served() -> Iterator[str]:
    """The address of a server that speaks S3, while it runs."""
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    server = pytest.importorskip("moto.server", reason="the dev tools are not installed")
    # moto looks through the folders of all services at each request.
    dispatcher = server.DomainDispatcherApplication
    if not hasattr(dispatcher.get_backend_for_host, "cache_info"):
        dispatcher.get_backend_for_host = cache(dispatcher.get_backend_for_host)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def emptied(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Url:
    """A place in an empty bucket of the server, which the environment names."""
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method)).close()
    return Url("s3://bucket/runs/a")
