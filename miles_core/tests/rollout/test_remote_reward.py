"""The HTTP reward against a real local server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from miles_core.errors import RewardError
from miles_core.kinds.reward import Scored
from miles_core.rollout import remote_reward
from miles_core.rollout.remote_reward import http_reward
from miles_core.rollout.rewards import RewardPool, RewardSpec
from miles_core.types import Message, Prompt

SCORED = Scored(
    prompt=Prompt(id="p1", messages=(Message(role="user", content="2 + 2?"),), label="4", metadata={"level": 1}),
    messages=(Message(role="user", content="2 + 2?"), Message(role="assistant", content="vier, bitte schön")),
    response="vier, bitte schön",
    truncated=False,
    metadata={"turns": 1},
)


class Server:
    """Answers each request with the next of `replies`: (status, body, whether it comes too late for the client)."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, bytes, bool]] = []
        self.requests: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                status, body, late = outer.replies.pop(0)
                if late:
                    self.rfile.read(1)  # comes to an end when the client closes the connection
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote_reward, "BACKOFF_S", 0.01)
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()
    thread.join()


def test_the_request_carries_all_that_a_grader_needs(server: Server) -> None:
    server.replies = [(200, b"0.75", False)]
    assert http_reward(SCORED, url=server.url) == 0.75
    (request,) = server.requests
    assert request["response"] == "vier, bitte schön"
    assert request["label"] == "4"
    assert request["metadata"] == {"level": 1, "turns": 1}
    assert request["prompt"]["messages"][0]["content"] == "2 + 2?"
    assert [message["role"] for message in request["messages"]] == ["user", "assistant"]
    assert request["truncated"] is False


def test_an_object_reports_parts(server: Server) -> None:
    server.replies = [(200, b'{"reward": 1, "style": 0.5}', False)]
    assert http_reward(SCORED, url=server.url) == {"reward": 1.0, "style": 0.5}


def test_a_broken_server_is_tried_again(server: Server) -> None:
    server.replies = [(500, b"oops", False), (429, b"slow down", False), (200, b"1", False)]
    assert http_reward(SCORED, url=server.url, retries=2) == 1.0


def test_a_server_that_stays_broken_is_named_with_what_it_said(server: Server) -> None:
    server.replies = [(503, b"loading the model", False)] * 2
    with pytest.raises(RewardError, match="no score in 2 tries") as raised:
        http_reward(SCORED, url=server.url, retries=1)
    assert "HTTP 503: loading the model" in str(raised.value)
    assert server.url in str(raised.value)


def test_a_slow_server_is_given_up_and_tried_again(server: Server) -> None:
    server.replies = [(200, b"0", True), *[(200, b"1", False)] * 20]  # a slow machine may need several
    assert http_reward(SCORED, url=server.url, timeout_s=0.2, retries=10) == 1.0
    assert len(server.requests) > 1
    server.replies = [(200, b"0", True)] * 20
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s"):
        http_reward(SCORED, url=server.url, timeout_s=0.2, retries=0)


def test_nobody_listening_is_a_clear_error(server: Server) -> None:
    with socket.socket() as taken:  # bound, so that nobody else gets the port, but never listening
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(RewardError, match="refused"):
            http_reward(SCORED, url=f"http://127.0.0.1:{taken.getsockname()[1]}/", retries=1)


def test_a_refusal_is_not_repeated(server: Server) -> None:
    server.replies = [(404, b"no such path", False), (200, b"1", False)]
    with pytest.raises(RewardError, match="HTTP 404"):
        http_reward(SCORED, url=server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [b"<html>hello</html>", b"", b"null", b"true", b'"1.0"', b"[1]", b'{"score": 1}', b'{"reward": "1"}'],
)
def test_an_answer_that_is_no_score_is_an_error_and_never_a_zero(server: Server, body: bytes) -> None:
    server.replies = [(200, body, False), (200, b"1", False)]
    with pytest.raises(RewardError, match="no score"):
        http_reward(SCORED, url=server.url)
    assert len(server.requests) == 1


def test_an_endless_answer_is_cut_off(server: Server) -> None:
    server.replies = [(200, b"1" * (remote_reward.MAX_REPLY_BYTES + 2), False)]
    with pytest.raises(RewardError, match="too long"):
        http_reward(SCORED, url=server.url)


def test_only_http_addresses_are_accepted() -> None:
    with pytest.raises(RewardError, match="not HTTP"):
        http_reward(SCORED, url="file:///etc/passwd")


async def test_it_works_from_a_reward_worker(server: Server) -> None:
    server.replies = [(200, b'{"reward": 0.5, "style": 1}', False), (200, b"NaN", False)]
    load = "miles_core.rollout.remote_reward:http_reward"
    spec = RewardSpec(name="http", load=load, options={"url": server.url, "timeout_s": 5.0, "retries": 0})
    async with RewardPool([spec], workers=1, timeout_s=10.0) as pool:
        assert await pool.score(SCORED) == (0.5, {"http": 0.5, "http.style": 1.0})
        with pytest.raises(RewardError, match="nan"):
            await pool.score(SCORED)
