# SPDX-License-Identifier: Apache-2.0
"""Loss of an embedding server against `LLM.embed` of the same texts, and the time to the first embedding of both.

    python -m benchmarks.embeddings.served [--shape minilm] [--clients 32] [--texts-per-request 1] [--rounds 5]
        [--num-texts 2000]

An offline engine and a server of the same random weights stay up and take turns. Each client sends its next request
when the last one is answered, over one connection, and asks for base64, as the stock openai client does; clients share
the machine with the server, so what they take counts, too. Before that each is started, from a new process to its first
embedding. Prints texts per second of each round and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.embeddings.engines import Quire
from benchmarks.embeddings.shapes import LOADS, SHAPES, texts_of, write_model
from benchmarks.served import server

FIRST = "from quire import LLM; import sys; LLM(sys.argv[1]).embed('a', use_tqdm=False)"


class Client(threading.Thread):
    """Sends its share of the texts, a few at a time."""

    def __init__(self, url: str, texts: Sequence[str], per_request: int) -> None:
        super().__init__()
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)
        self._batches = [texts[start : start + per_request] for start in range(0, len(texts), per_request)]
        self.num_answered = 0

    def run(self) -> None:
        for batch in self._batches:
            self.num_answered += ask(self._connection, batch)
        self._connection.close()


def ask(connection: http.client.HTTPConnection, texts: Sequence[str]) -> int:
    """Request embeddings and return their number; exit if the server refuses."""
    body = json.dumps({"input": list(texts), "encoding_format": "base64"})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    if reply.status != http.client.OK:
        sys.exit(f"the server refused: {answer}")
    return len(answer["data"])


def served(url: str, texts: Sequence[str], num_clients: int, per_request: int) -> float:
    """Texts per second."""
    clients = [Client(url, texts[number::num_clients], per_request) for number in range(num_clients)]
    start = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.perf_counter() - start
    assert sum(client.num_answered for client in clients) == len(texts), "a client failed"
    return len(texts) / seconds


def offline(engine: Quire, texts: Sequence[str]) -> float:
    """Texts per second."""
    start = time.perf_counter()
    engine.embed(texts)
    return len(texts) / (time.perf_counter() - start)


def started(directory: str) -> tuple[float, float]:
    """Seconds from a new process to the first embedding, of `LLM` and of a server."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", FIRST, directory], check=True, capture_output=True)
    alone = time.perf_counter() - start
    start = time.perf_counter()
    with server(directory, []) as url:
        ask(http.client.HTTPConnection(urlsplit(url).netloc), ["a"])
        return alone, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    embedders = [name for name, shape in SHAPES.items() if not shape.class_name.endswith("Classification")]
    parser.add_argument("--shape", choices=embedders, default="minilm")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--texts-per-request", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-texts", type=int, default=LOADS["texts"].num_texts)
    args = parser.parse_args()
    load = LOADS["texts"]._replace(num_texts=args.num_texts)
    with tempfile.TemporaryDirectory() as folder:
        write_model(SHAPES[args.shape], Path(folder))
        alone, there = started(folder)
        print(f"first embedding: {alone:.2f} s offline, {there:.2f} s served", flush=True)
        engine, ratios = Quire(Path(folder), SHAPES[args.shape]), []
        with server(folder, []) as url:
            served(url, texts_of(load, 0)[: 4 * args.clients], args.clients, args.texts_per_request)
            offline(engine, texts_of(load, 0)[:128])
            for number in range(args.rounds):
                texts = texts_of(load, number + 1)
                rate = offline(engine, texts)
                over_http = served(url, texts, args.clients, args.texts_per_request)
                ratios.append(over_http / rate)
                print(f"offline {rate:8.1f}   served {over_http:8.1f} texts/s", flush=True)
    print(f"served / offline: {100 * statistics.median(ratios):.1f} % (median of {len(ratios)} rounds)")


if __name__ == "__main__":
    main()
