"""Twelve mixtures of clients over HTTP: the engine's own choice of drafts beside every fixed k.

    python benchmarks/mixtures.py [--seconds 4] [--k auto 0 1 3] [-- ARGUMENTS OF SERVE]

For example, on a machine without a network:

    python benchmarks/mixtures.py --seconds 3 -- /models/target --draft /models/draft -k 6
    python benchmarks/mixtures.py --url http://gpu-server:8000 --k auto 0 3

It starts a server, or asks the one at --url. In each mixture the clients send completions, and the
next as soon as they have an answer. First the server chooses k (`auto`), then every request names
the same k; 0 is plain decoding; all of this in turn, --rounds times, forth and back, behind a turn
that does not count, since what comes first meets sizes that were never computed. The table has
median tokens a second, prompts included, and how the own choice compares with plain decoding and
with the best fixed k. `auto` should be at least 0.98 of the best everywhere. Short runs are noisy:
believe ratios of --seconds 10 and more.

Tokens are counted by the server, while all clients are busy: from a quarter of the time on. Clients
that rest have whole bursts counted. Answers are as long with every k.

What a client asks for sets how good drafts are: an edit of a file is easy at temperature 0, a poem
at 1.5 is hopeless, and an adversarial client sends a prediction that is wrong at every fifth word.
With --vocab-size N prompts are random tokens below N, for models that have no text. With
--set-acceptance, too, each kind has drafts as good as `set_chances` says, for a head of random
weights (see set_acceptance.py): adversarial ones are good and useless by turns.

    python benchmarks/published_shapes.py qwen3-8b /tmp/m --served --fp8
    python benchmarks/mixtures.py --set-acceptance --vocab-size 100000 --seconds 2 --rounds 1 \
        --k auto 0 1 3 6 -- /tmp/m --draft /tmp/m/eagle3 -k 6
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.table import Table
from serving import serving

TEXT = (
    "the a one of in and to river old machine letter every window slowly because table count "
    "north paper answer between seven green morning where road small light under question"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    text: str  # which prompt: chat, code, document or raw
    num_tokens: int  # of an answer, on the average
    temperature: float
    set_chances: str  # of a draft, in tenths, if they are set: in every other part of the answer
    prediction: str | None = None  # right or wrong: what the client predicts
    named_k: int | None = None  # it names this k, whatever is measured
    verification: str | None = None


CHAT = Kind("chat", 200, 0.7, "77")
RAW = Kind("raw", 48, 0.8, "33")
EDIT = Kind("code", 200, 0.0, "99")
POEM = Kind("raw", 200, 1.5, "22")
DOCUMENT = Kind("document", 48, 0.0, "66")
PINNED = Kind("chat", 200, 0.7, "77", named_k=3, verification="match")
WRONG = Kind("code", 100, 1.5, "90", prediction="wrong")


@dataclass(frozen=True)
class Mixture:
    clients: int
    kinds: tuple[Kind, ...]  # client i asks for kind i modulo their number
    rests: bool = False  # all clients ask at once, when all have their answers


MIXTURES = {
    "one chat": Mixture(1, (Kind("chat", 256, 0.0, "88"),)),
    "one raw": Mixture(1, (RAW,)),
    "few edits": Mixture(4, (EDIT, Kind("code", 200, 0.0, "98", prediction="right"))),
    "few raw": Mixture(8, (RAW,)),
    "some documents": Mixture(16, (DOCUMENT,)),
    "some easy, some hard": Mixture(32, (EDIT, POEM)),
    "many chats": Mixture(32, (CHAT,)),
    "pinned among them": Mixture(48, (PINNED, CHAT, CHAT, CHAT)),
    "bursts": Mixture(64, (RAW,), rests=True),
    "easy beside hard": Mixture(64, (EDIT, POEM)),
    "adversarial": Mixture(64, (WRONG, WRONG, CHAT)),
    "a crowd": Mixture(256, (*[Kind("chat", 64, 0.7, "77")] * 7, DOCUMENT)),
}


class Requests:
    """What clients ask for, with prompts and predictions that no request before has had."""

    def __init__(self, vocab_size: int | None, *, sets_acceptance: bool) -> None:
        self._vocab_size, self._sets_acceptance = vocab_size, sets_acceptance
        self._rng = random.Random(time.time_ns())

    def body(self, kind: Kind, k: int | None, number: str) -> dict[str, object]:
        """Requests of one number have the same seed, and answers of the same length."""
        own_rng = random.Random(number)
        text, prediction, seed = self._text(kind.text), None, own_rng.randrange(1 << 24)
        if kind.prediction is not None:
            words = text.split(" ")
            step = 5 if kind.prediction == "wrong" else len(words) + 1
            words[::step] = ["otherwise"] * len(words[::step])
            prediction = " ".join(words)
        body: dict[str, object] = {
            "prompt": text,
            "max_tokens": own_rng.randrange(kind.num_tokens // 2, kind.num_tokens * 3 // 2),
            "temperature": kind.temperature,
            "seed": 100 * seed + int(kind.set_chances) if self._sets_acceptance else seed,
            "ignore_eos": True,
        }
        if self._vocab_size is not None:
            count = len(text) // 4
            body["prompt"] = [self._rng.randrange(2, self._vocab_size) for _ in range(count)]
        elif prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        named_k = k if kind.named_k is None else kind.named_k
        rule = kind.verification or ("token" if self._sets_acceptance else None)
        speculation = {"num_speculative_tokens": named_k, "verification": rule}
        body["speculation"] = {name: each for name, each in speculation.items() if each is not None}
        return body

    def _text(self, name: str) -> str:
        rng = self._rng
        number = rng.randrange(1 << 40)
        if name == "raw":
            return f"{number}. " + " ".join(rng.choices(WORDS, k=12))
        if name == "chat":
            words = " ".join(rng.choices(WORDS, k=20))
            return f"Question {number}: explain to a friend why {words}?\n\nAnswer:"
        if name == "document":
            words = " ".join(rng.choices(WORDS, k=1200))
            return f"Report {number}. {words}\n\nIn short, the report says that"
        lines = [
            f"def {a}_{i}({b}, {c}):\n    return {b} + {i} * {c}\n"
            for i, (a, b, c) in enumerate(rng.sample(WORDS, 3) for _ in range(24))
        ]
        file = "\n".join(lines)
        return f"# File {number}\n{file}\n# The same file, with type hints\n{file[:200]}"


async def ask(host: str, port: int, body: dict[str, object]) -> None:
    """Send a completion, and wait for the whole answer."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + data)
        answer = await reader.read(-1)
    finally:
        writer.close()
    status, _, rest = answer.partition(b"\r\n")
    if b" 200 " not in status:
        raise RuntimeError(f"{status.decode()}: {rest[-500:].decode(errors='replace')}")


async def generated(place: tuple[str, int]) -> int:
    """Tokens that the server has generated so far."""
    async with httpx.AsyncClient(timeout=30) as http:
        metrics = (await http.get("http://{}:{}/metrics".format(*place))).raise_for_status().text
    found = re.search(r"^outrider_generation_tokens_total (\S+)$", metrics, re.M)
    if found is None:
        raise RuntimeError("the server does not count its tokens")
    return int(float(found[1]))


async def tokens_per_s(
    place: tuple[str, int], mixture: Mixture, k: int | None, seconds: float, requests: Requests
) -> float:
    """While all clients are busy; of those that rest, in the bursts that begin in this time."""

    async def client(i: int, turns: range) -> None:
        kind = mixture.kinds[i % len(mixture.kinds)]
        for turn in turns:
            await ask(*place, requests.body(kind, k, f"{i} {turn}"))

    async def ask_all(turns: range) -> None:
        await asyncio.gather(*(client(i, turns) for i in range(mixture.clients)))

    if mixture.rests:
        start_s, before, turn = time.perf_counter(), await generated(place), 0
        while time.perf_counter() < start_s + seconds:
            await ask_all(range(turn, turn + 1))
            turn += 1
        return (await generated(place) - before) / (time.perf_counter() - start_s)
    clients = asyncio.create_task(ask_all(range(sys.maxsize)))
    await asyncio.wait([clients], timeout=seconds / 4)
    start_s, before = time.perf_counter(), await generated(place)
    await asyncio.wait([clients], timeout=seconds)
    elapsed_s, after = time.perf_counter() - start_s, await generated(place)
    clients.cancel()
    with suppress(asyncio.CancelledError):  # but not what a client has raised
        await clients
    return (after - before) / elapsed_s


def row(name: str, clients: int, rates: dict[str, float]) -> Sequence[str]:
    cells = [name, str(clients), *(f"{rate:.0f}" for rate in rates.values())]
    fixed = {k: rate for k, rate in rates.items() if k != "auto"}
    if "auto" in rates:
        cells.append(f"{rates['auto'] / rates['0']:.2f}" if "0" in rates else "")
        cells.append(f"{rates['auto'] / max(fixed.values()):.2f}" if fixed else "")
    return cells


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs, such as http://localhost:8000")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each mixture and k")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many are shown")
    parser.add_argument("--k", nargs="+", default=["auto", "0", "1", "3"], metavar="K")
    parser.add_argument("--mixtures", nargs="+", default=list(MIXTURES), metavar="NAME")
    parser.add_argument("--most-clients", type=int, default=256, help="leave larger mixtures out")
    parser.add_argument("--vocab-size", type=int, help="prompts are random tokens below this")
    parser.add_argument(
        "--set-acceptance", action="store_true", help="of the server's drafts, by kind of request"
    )
    args = parser.parse_args(sys.argv[1:at])
    if unknown := [name for name in args.mixtures if name not in MIXTURES]:
        parser.error(f"there is no mixture {unknown[0]!r}; there are {', '.join(MIXTURES)}")
    log = Path(tempfile.mkdtemp(prefix="outrider-mixtures-")) / "serve.log"
    requests = Requests(args.vocab_size, sets_acceptance=args.set_acceptance)
    names = [f"k = {k}" if k != "auto" else "auto" for k in args.k]
    ratios = ["auto / plain", "auto / best"] if "auto" in args.k else []
    table = Table("mixture", "clients", *names, *ratios, title="tokens a second")
    with ExitStack() as stack:
        if args.url:
            url = urlsplit(args.url)
            place = url.hostname or "127.0.0.1", url.port or 80
        else:
            acceptance: Literal["seed"] | None = "seed" if args.set_acceptance else None
            started = serving(log, sys.argv[at + 1 :], tokens_a_step=acceptance)
            server = stack.enter_context(started)
            place = server.host, server.port
        print(" | ".join(["mixture", "clients", *names, *ratios]), flush=True)
        for name in args.mixtures:
            mixture = MIXTURES[name]
            if mixture.clients > args.most_clients:
                continue
            turns: dict[str, list[float]] = {k: [] for k in args.k}
            asyncio.run(tokens_per_s(place, mixture, None, args.seconds / 2, requests))
            for round_ in range(args.rounds):
                for k in args.k if round_ % 2 == 0 else reversed(args.k):
                    own_k = None if k == "auto" else int(k)
                    turn = tokens_per_s(place, mixture, own_k, args.seconds, requests)
                    turns[k].append(asyncio.run(turn))
            rates = {k: median(seen) for k, seen in turns.items()}
            cells = row(name, mixture.clients, rates)
            table.add_row(*cells)
            print(" | ".join(cells), flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
