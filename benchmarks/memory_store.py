"""An S3 server that keeps objects in memory and does nothing else: no checksums, no signatures, no disk.

    python benchmarks/memory_store.py

Prints the port of 127.0.0.1 that it listens on, and ends when its standard input ends. A real store hashes what it
gets, on machines of its own; here one takes most of the cores that it shares with its clients, and hides what they do.
It knows the requests of ``obstore``: puts, with conditions, in parts, ranges, listings and deletions.
"""

import re
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

_TIME = "%Y-%m-%dT%H:%M:%S.000Z"


class Object(NamedTuple):
    """The parts of an object, one after the other."""

    parts: list[bytearray]
    tag: str
    put_at: datetime

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes [begin, end) as they lie in the parts."""
        for part in self.parts:
            if begin < len(part) and end > 0:
                yield memoryview(part)[max(begin, 0) : end]
            begin, end = begin - len(part), end - len(part)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, Object] = {}
    uploads: dict[str, dict[int, bytearray]] = {}
    lock = threading.Lock()

    def do_PUT(self) -> None:
        key, query = self._target()
        body = self._body()
        if "uploadId" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return self._answer(200, {"ETag": _new_tag()})
        with self.lock:
            found = self.objects.get(key)
            wanted = self.headers.get("If-Match")
            if (self.headers.get("If-None-Match") and found) or (wanted and (found is None or found.tag != wanted)):
                return self._answer(412, body=b"<Error><Code>PreconditionFailed</Code></Error>")
            tag = self._keep(key, [body])
        self._answer(200, {"ETag": tag})

    def do_POST(self) -> None:
        key, query = self._target()
        body = self._body()
        if "delete" in query:
            keys = re.findall("<Key>([^<]*)</Key>", body.decode())
            for deleted in keys:
                self.objects.pop(deleted, None)
            deletions = "".join(f"<Deleted><Key>{deleted}</Key></Deleted>" for deleted in keys)
            return self._answer(200, body=f"<DeleteResult>{deletions}</DeleteResult>".encode())
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            started = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._answer(200, body=started.encode())
        parts = self.uploads.pop(query["uploadId"])
        tag = self._keep(key, [parts[number] for number in sorted(parts)])
        ended = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, body=ended.encode())

    def do_GET(self) -> None:
        key, query = self._target()
        if "list-type" in query:
            return self._answer(200, body=self._listing(query).encode())
        found = self.objects.get(key)
        if found is None:
            return self._answer(404, body=b"<Error><Code>NoSuchKey</Code></Error>")
        begin, end, status = 0, found.num_bytes, 200
        headers = _headers_of(found)
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end, status = int(match[1]), min(int(match[2]) + 1, end), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{found.num_bytes}"
        self._begin(status, headers, end - begin)
        for piece in found.pieces(begin, end):
            self.wfile.write(piece)

    def do_HEAD(self) -> None:
        found = self.objects.get(self._target()[0])
        if found is None:
            self._begin(404, {}, 0)
        else:
            self._begin(200, _headers_of(found), found.num_bytes)

    def do_DELETE(self) -> None:
        self.objects.pop(self._target()[0], None)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _target(self) -> tuple[str, dict[str, str]]:
        """The key below the bucket, and the query."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        return unquote(url.path).lstrip("/").partition("/")[2], query

    def _body(self) -> bytearray:
        body = bytearray(int(self.headers.get("Content-Length", 0)))
        view = memoryview(body)
        while view:
            view = view[self.rfile.readinto(view) :]
        return body

    def _keep(self, key: str, parts: list[bytearray]) -> str:
        tag = _new_tag()
        self.objects[key] = Object(parts, tag, datetime.now(timezone.utc))
        return tag

    def _listing(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rows, folders = [], set()
        for key, found in sorted(self.objects.items()):
            if not key.startswith(prefix):
                continue
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if mark:
                folders.add(prefix + head + mark)
                continue
            rows.append(
                f"<Contents><Key>{key}</Key><LastModified>{found.put_at.strftime(_TIME)}</LastModified>"
                f"<ETag>{found.tag}</ETag><Size>{found.num_bytes}</Size></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self._begin(status, headers or {}, len(body))
        self.wfile.write(body)

    def _begin(self, status: int, headers: dict[str, str], num_bytes: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()


def _headers_of(found: Object) -> dict[str, str]:
    return {"ETag": found.tag, "Last-Modified": format_datetime(found.put_at, usegmt=True)}


def _new_tag() -> str:
    return f'"{uuid.uuid4().hex}"'


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
