"""Ports of a server that Miles starts: nobody gets them in between, and where somebody did others are chosen."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.tiny import make_tiny_model
from miles_sglang.engine import SglangEngine
from miles_sglang.options import SglangOptions
from miles_sglang.process import reserved_port

LISTENING = """
import http.server, json, socket, sys
ports = {flag: int(value) for flag, _, value in (each.partition("=") for each in sys.argv[1:]) if flag.endswith("port")}
name = next(each.partition("=")[2] for each in sys.argv if each.startswith("--served-model-name="))
kept = socket.create_server(("127.0.0.1", ports["--nccl-port"]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = [] if self.path == "/server_info" else {"served_model_name": name}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

http.server.ThreadingHTTPServer(("127.0.0.1", ports["--port"]), Handler).serve_forever()
"""
"""A server that listens at both its ports, as SGLang does."""


async def test_a_port_that_somebody_takes_before_the_server_has_it_costs_one_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sockets: of the first choice, somebody who reuses addresses gets the port at which ranks meet."""
    chosen: list[int] = []
    somebody = socket.socket()
    somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    @contextlib.contextmanager
    def choose() -> Iterator[int]:
        with reserved_port() as port:
            chosen.append(port)
            if len(chosen) == 2:
                somebody.bind(("127.0.0.1", port))
                somebody.listen()
            yield port

    monkeypatch.setattr("miles_sglang.server.reserved_port", choose)
    (tmp_path / "listening.py").write_text(LISTENING)
    model = make_tiny_model(tmp_path / "model", context=96)
    options = SglangOptions(
        python=sys.executable,
        module="listening",
        python_path=(str(tmp_path),),
        staging_dir=str(tmp_path),
        log_dir=str(tmp_path / "logs"),
    )
    engine = SglangEngine(options, EngineContext(model_path=str(model), context_length=None, device="cpu", seed=0))
    with pytest.raises(EngineError, match="is no SGLang"):  # so it answered, at all its ports
        await engine.start()
    somebody.close()
    assert len(chosen) == 4
    log = (tmp_path / "logs" / "engine-0.log").read_text()
    assert log.count("Address already in use") == 1


def test_a_reserved_port_is_given_to_nobody_and_serves_who_names_it() -> None:
    with reserved_port() as port:
        others = [socket.socket() for _ in range(300)]
        for other in others:
            other.bind(("127.0.0.1", 0))
        assert port not in {other.getsockname()[1] for other in others}
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
        for other in others:
            other.close()
