"""What clients that mean harm cost a server: run before a change and after it.

    outrider serve --port 8123 & python benchmarks/attacks.py http://127.0.0.1:8123 --pid $!

Each attack is one client's, bounded in count and time, and goes to a loopback address only. Beside
it, /live is asked twenty times a second: `wait` is the longest that it took, which says how long
the event loop was blocked. With the server's `--pid`, `memory` is what all its processes grew by at
most, `left` what of it remained two seconds after the end, and `CPU` the seconds that they spent.
`answers` are the statuses that came back; `none`: the server closed, or the time was over.

Run it against a server that nobody else uses. An attack on the parsers of tool calls needs one that
was started with `--set server.tool_call_format=qwen_xml`; the one on the number of connections says
most if `server.max_connections` is small.
"""

import argparse
import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

BODY_BYTES = 4_100_000  # a little less than server.max_body_bytes is by default
PROBE_S = 0.05
SETTLE_S = 2.0
MB = 2**20


@dataclass
class Target:
    """The server under attack, and what came of it."""

    host: str
    port: int
    key: str | None
    limit_s: float  # for each attack
    answers: Counter[str] = field(default_factory=Counter)
    deadline_s: float = 0.0

    @property
    def left_s(self) -> float:
        return max(0.05, self.deadline_s - time.monotonic())

    @contextlib.contextmanager
    def connection(self, receive_bytes: int | None = None) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as client:
            if receive_bytes is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            client.settimeout(self.left_s)
            client.connect((self.host, self.port))
            yield client

    def request(self, path: str, body: bytes) -> bytes:
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{key}content-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def read(self, client: socket.socket) -> bytes:
        """One answer, counted by its status; nothing if none came."""
        data = b""
        with contextlib.suppress(OSError):
            client.settimeout(self.left_s)
            with client.makefile("rb") as stream:
                head = stream.readline()
                length = None
                while (line := stream.readline()) not in (b"\r\n", b""):
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                status = head.split()[1].decode() if head else "none"
                self.answers[status] += 1
                if length is not None:
                    data = stream.read(length)
                else:
                    while (size := int(stream.readline() or b"0", 16)) > 0:
                        data += stream.read(size)
                        stream.readline()
                return data
        self.answers["none"] += 1
        return data

    def post(self, path: str, body: bytes) -> bytes:
        with contextlib.suppress(OSError), self.connection() as client:
            client.sendall(self.request(path, body))
            return self.read(client)
        self.answers["none"] += 1
        return b""

    def post_at_once(self, path: str, body: bytes, times: int) -> None:
        with ThreadPoolExecutor(times) as pool:
            list(pool.map(lambda _: self.post(path, body), range(times)))


Attack = Callable[[Target], None]
ATTACKS: dict[str, Attack] = {}


def attack(run: Attack) -> Attack:
    ATTACKS[run.__name__.replace("_", "-")] = run
    return run


def filled(before: str, item: str, after: str, num_bytes: int = BODY_BYTES) -> bytes:
    """A body of about so many bytes: a list of equal items between two texts."""
    num = (num_bytes - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * num) + after).encode()


CHAT = '{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,'
FUNCTION = '{"type":"function","function":{"name":"%s"}}'


# ---- time of the event loop


@attack
def allowed_tools(target: Target) -> None:
    """80,000 allowed tools in a choice beside 1,024 tools: compared in pairs?"""
    tools = ",".join(FUNCTION % f"f{i}" for i in range(1024))
    choice = '"tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":['
    body = filled(f'{CHAT}"tools":[{tools}],{choice}', FUNCTION % "f1023", "]}}}")
    target.post("/v1/chat/completions", body)


@attack
def schemas_of_parameters(target: Target) -> None:
    """Calls in Qwen's XML whose one parameter has a schema of 3 MB: read anew for each tag?"""
    kinds = ",".join(['{"type":"null"}'] * (3_250_000 // 16))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 0}}}}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 8,
        "max_tokens": 400,
        "temperature": 0,
        "tools": [tool],
        "structured_outputs": {
            "regex": "<tool_call>\n<function=f>\n(<parameter=a>\n1\n</parameter>\n){50}"
        },
    }
    text = json.dumps(body).replace('{"a": 0}', f'{{"a": {{"anyOf": [{kinds}]}}}}')
    target.post("/v1/chat/completions", text.encode())


@attack
def prompts_of_one_token(target: Target) -> None:
    """A million prompts in one request: counted before they are read?"""
    target.post("/v1/completions", filled('{"prompt":[', "[1]", "]}"))


@attack
def empty_schemas(target: Target) -> None:
    """A schema that is a list of a million empty schemas."""
    before = CHAT + '"response_format":{"type":"json_schema","json_schema":{"schema":{"allOf":['
    target.post("/v1/chat/completions", filled(before, "{}", "]}}}}"))


@attack
def content_parts(target: Target) -> None:
    """A message of 100,000 parts."""
    part = '{"type":"text","text":"x"}'
    before = '{"max_tokens":1,"messages":[{"role":"user","content":['
    target.post("/v1/chat/completions", filled(before, part, "]}]}"))


@attack
def content_parts_of_each_api(target: Target) -> None:
    """The same as items and blocks of the other APIs, five at once."""
    text, given = '{"type":"text","text":"x"}', '{"type":"input_text","text":"x"}'
    role = '[{"role":"user","content":['
    bodies = [
        ("/v1/responses", filled(f'{{"input":{role}', given, "]}]}")),
        ("/v1/responses/input_tokens", filled('{"input":[', '{"role":"user","content":""}', "]}")),
        ("/v1/messages", filled(f'{{"max_tokens":1,"messages":{role}', text, "]}]}")),
        ("/v1/messages/count_tokens", filled(f'{{"messages":{role}', text, "]}]}")),
        ("/tokenize", filled(f'{{"messages":{role}', text, "]}]}")),
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda each: target.post(*each), bodies))


@attack
def stored_conversation(target: Target) -> None:
    """96 short requests that each continue a stored conversation of 27,000 parts."""
    said = '{"role":"user","content":"Hi"}'  # and thoughts, which most templates leave out
    before = f'{{"max_output_tokens":1,"input":[{said},{{"type":"reasoning","summary":['
    part = '{"type":"summary_text","text":""}'
    answer = target.post("/v1/responses", filled(before, part, f"]}},{said}]}}", 900_000))
    try:
        response_id = json.loads(answer)["id"]
    except (ValueError, KeyError):
        return
    body = json.dumps({"input": "x", "previous_response_id": response_id}).encode()

    def pipelined(_: int) -> None:
        with contextlib.suppress(OSError), target.connection() as client:
            client.sendall(target.request("/v1/responses/input_tokens", body) * 16)
            for _ in range(16):
                target.read(client)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(pipelined, range(6)))


@attack
def stop_tables(target: Target) -> None:
    """24 streams with 16 stop strings each, all of them different: their tables are made once?"""

    def stream(number: int) -> None:
        stops = [f"{number}-{i}-" + "ab" * 500 for i in range(16)]
        body = {"prompt": "Once", "max_tokens": 64, "ignore_eos": True, "stream": True}
        target.post("/v1/completions", json.dumps(body | {"stop": stops}).encode())

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(stream, range(24)))


# ---- memory


@attack
def ignored_fields(target: Target) -> None:
    """40 requests with 4 MB of nested lists in a field that nobody reads, and long answers."""
    before = '{"prompt":"Once","max_tokens":64,"ignore_eos":true,"metadata":['
    target.post_at_once("/v1/completions", filled(before, "[{}]", "]}"), 40)


@attack
def ignored_fields_of_each_api(target: Target) -> None:
    """The same in chats, responses and messages, where others are passed on: 8 of each."""
    chat = '"messages":[{"role":"user","content":"Hi"}],'
    bodies = [
        ("/v1/chat/completions", f'{{"max_tokens":64,{chat}"chat_template_kwargs":{{"x":['),
        (
            "/v1/chat/completions",
            '{"max_tokens":64,"messages":[{"role":"user","content":"Hi","x":{"x":[',
        ),
        ("/v1/responses", '{"max_output_tokens":64,"input":"Hi","reasoning":{"x":['),
        ("/v1/messages", f'{{"max_tokens":64,{chat}"thinking":{{"type":"disabled","x":['),
    ]
    ends = ["]}}", "]}}]}", "]}}", "]}}"]
    sent = [
        (path, filled(before, "[{}]", end))
        for (path, before), end in zip(bodies, ends, strict=True)
    ]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda each: target.post(*each), sent * 8))


@attack
def bodies_without_end(target: Target) -> None:
    """60 bodies of 4 MB of which the last byte does not come."""
    body = filled('{"prompt":[', "1", "]}")
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(target.connection())
            with contextlib.suppress(OSError):
                client.settimeout(1)
                client.sendall(target.request("/v1/completions", body)[:-1])
        time.sleep(1)


@attack
def text_of_tokens(target: Target) -> None:
    """Ten answers of /detokenize that nobody reads, but for a byte now and then."""
    trickle(target, "/detokenize", filled('{"tokens":[', "3000", "]}"), 10)


@attack
def tokens_of_text(target: Target) -> None:
    """One /tokenize of 4 MB that asks for the tokens as texts, too."""
    body = json.dumps({"prompt": " a1" * (BODY_BYTES // 3), "return_token_strs": True}).encode()
    target.post("/tokenize", body)


@attack
def unread_streams(target: Target) -> None:
    """16 streams with logprobs that nobody reads, but for a byte now and then."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    trickle(target, "/v1/completions", json.dumps(body).encode(), 16)


def trickle(target: Target, path: str, body: bytes, times: int) -> None:
    """Send requests, and read a byte of each answer twice a second."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(target.connection(4096)) for _ in range(times)]
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(target.request(path, body))
        end_s = time.monotonic() + min(20.0, target.left_s)
        while time.monotonic() < end_s and clients:
            time.sleep(0.5)
            for client in list(clients):
                client.settimeout(0.01)
                try:
                    if client.recv(1):
                        continue
                except TimeoutError:
                    continue
                except OSError:
                    pass
                target.answers["closed"] += 1
                clients.remove(client)
        target.answers["unread"] += len(clients)


# ---- connections


@attack
def connections_that_only_ask_for_life(target: Target) -> None:
    """1,200 requests without an end to a path that only ends in /live: how many are let in?"""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(1200):
            with contextlib.suppress(OSError):
                client = stack.enter_context(target.connection())
                client.sendall(target.request("/v1/completions?/live", b"{ ")[:-1])
                clients.append(client)
        time.sleep(1)
        for client in clients:
            client.settimeout(0.001)
            try:
                status = client.recv(64).split()[1:2]
                target.answers[status[0].decode() if status else "none"] += 1
            except TimeoutError:
                target.answers["let in"] += 1
            except OSError:
                target.answers["none"] += 1


# ---- what it cost


class Watch:
    """Asks /live, and looks at the memory of the server's processes, until it is stopped."""

    def __init__(self, target: Target, pid: int | None) -> None:
        self._target, self._root = target, psutil.Process(pid) if pid else None
        self._stopped = threading.Event()
        self.waits_s: list[float] = []
        self.first_bytes = self.most_bytes = self.last_bytes = self._bytes()
        self._cpu_s = self._spent_s()

    def _processes(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)] if self._root else []

    def _bytes(self) -> int:
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _spent_s(self) -> float:
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    def __enter__(self) -> "Watch":
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._ask, self._see)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        time.sleep(SETTLE_S)
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self.last_bytes = self._bytes()
        self.cpu_s = self._spent_s() - self._cpu_s

    def _ask(self) -> None:
        ask = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        while not self._stopped.wait(PROBE_S):
            start_s = time.monotonic()
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self._target.host, self._target.port), 60) as client,
            ):
                client.sendall(ask)
                while client.recv(4096):
                    pass
            self.waits_s.append(time.monotonic() - start_s)

    def _see(self) -> None:
        while not self._stopped.wait(PROBE_S):
            self.most_bytes = max(self.most_bytes, self._bytes())


def run(name: str, target: Target, pid: int | None) -> list[str]:
    target.answers.clear()
    target.deadline_s = time.monotonic() + target.limit_s
    with Watch(target, pid) as watch:
        ATTACKS[name](target)
    answers = ", ".join(f"{count} × {what}" for what, count in sorted(target.answers.items()))
    row = [name, answers, f"{max(watch.waits_s):.2f} s"]
    if pid is not None:
        most, left = watch.most_bytes - watch.first_bytes, watch.last_bytes - watch.first_bytes
        row += [f"{most / MB:.0f} MB", f"{left / MB:.0f} MB", f"{watch.cpu_s:.1f} s"]
    return row


def main() -> None:
    about, _, more = (__doc__ or "").partition("\n")
    named = "\n".join(f"  {name}: {run.__doc__}" for name, run in ATTACKS.items())
    parser = argparse.ArgumentParser(
        description=about,
        epilog=f"{more}\nThe attacks:\n\n{named}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the server, at a loopback address: http://127.0.0.1:8123")
    parser.add_argument("--pid", type=int, help="the server's process id: look at its memory, too")
    parser.add_argument("--key", help="an API key, if the server asks for one")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="NAME", help="these alone")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds an attack may take (60)")
    args = parser.parse_args()
    url = urlsplit(args.url)
    host = {"localhost": "127.0.0.1"}.get(url.hostname or "", url.hostname or "")
    try:
        if url.scheme != "http" or not ipaddress.ip_address(host).is_loopback:
            raise ValueError
    except ValueError:
        parser.error(f"{args.url} is no loopback address: attack servers of your own only")
    target = Target(host, url.port or 80, args.key, args.limit)
    columns = ["attack", "answers", "wait", *(["memory", "left", "CPU"] if args.pid else [])]
    table = Table(*columns)
    console = Console()
    for name in args.only or ATTACKS:
        row: list[Any] = run(name, target, args.pid)
        table.add_row(*row)
        console.print(*row, sep=" | ", style="dim")
    console.print(table)


if __name__ == "__main__":
    main()
