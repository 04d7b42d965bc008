"""A proxy between clients and an object server that holds, cuts, corrupts and refuses what a test names.

It listens on a TCP port, in threads of the test's process: clients in any process use its address as endpoint, and the
test adds and removes rules while they run. Requests reach the server as they were sent, ``Host`` included, so that
their signatures hold. Bodies stream through in pieces.

Example: the first conditional put takes effect, and its client sees a closed connection.
    with FaultProxy(server.endpoint) as proxy:
        rule = proxy.add(Fault("lose_answer"), method="PUT", header="If-None-Match", matches={1})
        ...
        proxy.remove(rule)
"""

import itertools
import random
import re
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing
from typing import Any, Literal
from urllib.parse import urlsplit

import h11
from request_faults import Exchange, Fault, Rule

RECEIVE_BYTES = 1 << 18
SPOOL_BYTES = 1 << 20
# A client that is alive closes its side at once when the other one is closed.
DRAIN_SECONDS = 2.0

# How S3 names the errors of these statuses.
CODES = {
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


class Cut(Exception):
    """The client's connection ends here."""


class Peer:
    """One end of a connection: a socket and the HTTP/1.1 state of it."""

    def __init__(self, connection: socket.socket, role: Any) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.http = h11.Connection(role)

    def next_event(self) -> Any:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.http.receive_data(self.socket.recv(RECEIVE_BYTES))
        return event

    def body(self) -> Iterator[bytes]:
        while isinstance(event := self.next_event(), h11.Data):
            yield bytes(event.data)
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionAbortedError("the other side left within a body")

    def send(self, event: Any) -> None:
        self.socket.sendall(self.http.send(event) or b"")

    def end(self, cut: Literal["close", "reset"]) -> None:
        """Ends the connection so that the other side sees what ``Fault.cut`` says."""
        if cut == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()
            return
        # The kernel sends RST for a socket that is closed with bytes unread.
        self.socket.shutdown(socket.SHUT_WR)
        self.socket.settimeout(DRAIN_SECONDS)
        while self.socket.recv(RECEIVE_BYTES):
            pass


class FaultProxy:
    """A proxy in front of the server at ``endpoint``; ``with`` starts it and ends it with all its connections.

    Attributes:
        endpoint: Its own address.
    """

    def __init__(self, endpoint: str, *, seed: int = 0) -> None:
        """Makes a proxy that draws for rules with a probability by ``seed``."""
        address = urlsplit(endpoint)
        self._upstream = (str(address.hostname), int(address.port or 80))
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._rules: list[Rule] = []
        self._log: list[Exchange] = []
        self._clients: set[Peer] = set()
        self._num_at_once = 0
        self._is_open = False

    def __enter__(self) -> "FaultProxy":
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="proxy accepts").start()
        return self

    def __exit__(self, *_: object) -> None:
        # A thread that waits in accept() does not notice close().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            self._is_open = True
            self._changed.notify_all()
            clients = list(self._clients)
        for client in clients:
            try:
                client.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # ---- what tests call ----

    def add(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        path: str = "",
        header: str | None = None,
        matches: Container[int] | None = None,
        probability: float = 1.0,
    ) -> Rule:
        """Lets requests meet a fault from now on; of several rules the first one that was added decides.

        Args:
            path: A regular expression that is searched in path and query, such as ``"/w$"`` or ``"uploadId="``.
            header: A header that the request has, such as ``"If-None-Match"``.
            matches: Which of the matching requests, counted from 1, such as ``{2}`` or ``range(1, 4)``; ``None``: all.
            probability: With which each of these meets the fault.
        """
        rule = Rule(fault, method, re.compile(path), header and header.lower(), matches, probability)
        with self._changed:
            self._rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        with self._changed:
            self._rules.remove(rule)

    def clear(self) -> None:
        """Removes all rules and forgets what was logged."""
        with self._changed:
            self._rules.clear()
            self._log.clear()

    def log(self) -> list[Exchange]:
        """The requests that were answered or cut, in the order in which they were, each before its client knows."""
        with self._changed:
            return list(self._log)

    def counts(self) -> Counter[str]:
        """How many requests of each method are in the log."""
        return Counter(exchange.method for exchange in self.log())

    def wait_until_idle(self) -> None:
        """Releases late requests, and waits until no request is in the proxy."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_at_once == 0)
            self._is_open = False

    def _hold(self) -> None:
        """Returns when late requests are released."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)

    # ---- one thread for each connection of a client ----

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="proxy serves").start()

    def _serve(self, connection: socket.socket) -> None:
        client = Peer(connection, h11.SERVER)
        with self._changed:
            self._clients.add(client)
        try:
            with closing(connection):
                while isinstance(request := client.next_event(), h11.Request):
                    self._answer(client, request)
                    if client.http.our_state is not h11.DONE or client.http.their_state is not h11.DONE:
                        break
                    client.http.start_next_cycle()
        except (Cut, OSError, h11.ProtocolError):
            pass
        finally:
            with self._changed:
                self._clients.discard(client)

    def _answer(self, client: Peer, request: h11.Request) -> None:
        method, path = request.method.decode(), request.target.decode()
        fault = self._enter(request)

        def write_log(status: int | None) -> None:
            with self._changed:
                self._log.append(Exchange(method, path, status, fault and fault.kind))

        passage = Passage(client, self._upstream, request, fault or Fault("pass"), write_log, self._hold)
        try:
            passage.run()
        finally:
            passage.note(None)
            with self._changed:
                self._num_at_once -= 1
                self._changed.notify_all()

    def _enter(self, request: h11.Request) -> Fault | None:
        """Counts a request, and decides which fault it meets."""
        headers = {name.decode() for name, _ in request.headers}
        with self._changed:
            self._num_at_once += 1
            chosen: Rule | None = None
            for rule in self._rules:
                if rule.method not in (None, request.method.decode()) or not rule.path.search(request.target.decode()):
                    continue
                if rule.header is not None and rule.header not in headers:
                    continue
                rule.num_matches += 1
                is_hit = rule.matches is None or rule.num_matches in rule.matches
                if chosen is None and is_hit and self._random.random() < rule.probability:
                    chosen = rule
            if chosen is None:
                return None
            chosen.num_fired += 1
            return chosen.fault


class Passage:
    """The way of one request to the server, and of its answer back; ``write_log`` is called once, with its status;
    a late request goes on when ``hold`` returns.
    """

    def __init__(
        self,
        client: Peer,
        upstream: tuple[str, int],
        request: h11.Request,
        fault: Fault,
        write_log: Callable[[int | None], None],
        hold: Callable[[], None],
    ) -> None:
        self.client = client
        self.upstream = upstream
        self.request = request
        self.fault = fault
        self.write_log = write_log
        self.hold = hold
        self.is_logged = False

    def note(self, status: int | None) -> None:
        """Logs what was answered, unless that is known; ``None``: nothing will be."""
        if not self.is_logged:
            self.is_logged = True
            self.write_log(status)

    def run(self) -> None:
        if self.fault.kind == "late":
            self._forward_late()
            return
        if self.fault.kind == "cut_before":
            self._cut()
        elif self.fault.kind == "answer":
            self._refuse()
        else:
            self._forward()

    def _cut(self) -> None:
        self.note(None)
        self._leave_client()
        raise Cut

    def _leave_client(self) -> None:
        try:
            self.client.end(self.fault.cut)
        except OSError:
            # It has left before.
            pass

    def _refuse(self) -> None:
        for _ in self.client.body():
            pass
        status = self.fault.status
        self.note(status)
        code = CODES.get(status, "Error")
        text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>by a test</Message></Error>'
        body = b"" if self.request.method == b"HEAD" else text.encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        if self.fault.retry_after_seconds is not None:
            headers.append(("Retry-After", str(self.fault.retry_after_seconds)))
        self.client.send(h11.Response(status_code=status, headers=headers))
        self.client.send(h11.Data(data=body))
        self.client.send(h11.EndOfMessage())

    def _forward(self) -> None:
        # A new connection for each request: one that was kept could be closed by the server at any time.
        with closing(socket.create_connection(self.upstream)) as connection:
            server = Peer(connection, h11.CLIENT)
            self._send_request(server, self.client.body())
            answer = self._receive_head(server)
            if self.fault.kind == "lose_answer":
                for _ in server.body():
                    pass
                self._cut()
            self.client.send(answer)
            for data in self._meddled(server.body(), "answer"):
                self.client.send(h11.Data(data=data))
            self.client.send(h11.EndOfMessage())

    def _forward_late(self) -> None:
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as body:
            for data in self.client.body():
                body.write(data)
            self._leave_client()
            self.hold()
            body.seek(0)
            with closing(socket.create_connection(self.upstream)) as connection:
                server = Peer(connection, h11.CLIENT)
                self._send_request(server, iter(lambda: body.read(RECEIVE_BYTES), b""))
                self._receive_head(server)
                for _ in server.body():
                    pass
        raise Cut

    def _send_request(self, server: Peer, body: Iterable[bytes]) -> None:
        pieces = (h11.Data(data=data) for data in self._meddled(body, "request"))
        for event in itertools.chain([self.request], pieces, [h11.EndOfMessage()]):
            try:
                server.send(event)
            except (BrokenPipeError, ConnectionResetError):
                # The server may answer, and close, before it has read the whole request.
                return

    def _meddled(self, body: Iterable[bytes], way: Literal["request", "answer"]) -> Iterator[bytes]:
        """A body as it comes through the fault."""
        begin = 0
        for data in body:
            place = self.fault.num_bytes - begin
            begin += len(data)
            if 0 <= place < len(data) and self.fault.kind == f"cut_{way}":
                yield data[:place]
                self._cut()
            if 0 <= place < len(data) and self.fault.kind == f"corrupt_{way}":
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            yield data

    def _receive_head(self, server: Peer) -> h11.Response:
        while isinstance(answer := server.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(answer, h11.Response):
            raise ConnectionAbortedError("the server left without an answer")
        self.note(answer.status_code)
        return answer
