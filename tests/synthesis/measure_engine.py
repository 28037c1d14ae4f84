"""
The engine against a bare client, on the same requests to the same server in one run: `measure_engine.py 10000 64 0`.

Arguments: items, requests at a time, seconds that the server takes for each. Prints JSON: requests per second of three
clients, what the engine reaches of the others, and its peak memory after a tenth of the items and after all, in MB. The
bare client is the `openai` package alone, the raw one a socket with no HTTP library at all.
"""

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from openai import AsyncOpenAI

from qtsplus.synthesis.engine import Item, run
from qtsplus.synthesis.questions import first_messages, wanted_types
from scripted_server import scripted_server
from synthesis_run import captions, questions_job


def requests(count):
    """What the engine sends, as the API takes it."""
    for position, caption in enumerate(captions(count)):
        item = Item(position, caption.id, caption)
        messages = first_messages(caption.caption, wanted_types(item))
        asked = {"max_tokens": 2048, "seed": item.seed, "temperature": 0.0}
        yield {"model": "teacher", "messages": messages, **asked}


async def bare(url, count, concurrency):
    """Requests per second of the client library alone."""
    waiting = requests(count)

    async def work(client):
        for request in waiting:
            made = await client.chat.completions.create(**request)
            assert made.choices[0].message.content

    async with AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as client:
        started = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
        return count / (time.perf_counter() - started)


async def raw(url, count, concurrency):
    """Requests per second over plain sockets, which is what the server can do."""
    waiting, port = requests(count), urlsplit(url).port

    async def work():
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**26)
        for request in waiting:
            body = json.dumps(request).encode()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            json.loads(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return count / (time.perf_counter() - started)


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(items=10_000, concurrency=64, latency=0.0):
    with tempfile.TemporaryDirectory() as folder, scripted_server(folder, latency=latency, log=None) as (url, _):
        out = Path(folder)
        run(questions_job(url, items // 10), out / "first", concurrency=concurrency)
        memory = [peak_mb()]
        # The bare client before and after, for other work on the machine comes and goes.
        rates = [asyncio.run(bare(url, items // 2, concurrency))]
        started = time.perf_counter()
        run(questions_job(url, items), out / "all", concurrency=concurrency)
        engine = items / (time.perf_counter() - started)
        memory.append(peak_mb())
        rates.append(asyncio.run(bare(url, items // 2, concurrency)))
        server = asyncio.run(raw(url, items, concurrency))
        rows = len((out / "all" / "vscq1.jsonl").read_text().splitlines())
    bare_rate = 2 / sum(1 / rate for rate in rates)
    told = {"items": items, "concurrency": concurrency, "latency": latency, "rows": rows}
    clients = {"engine": engine, "bare": bare_rate, "bare_before_and_after": rates, "raw": server}
    shares = {"of_bare": engine / bare_rate, "of_raw": engine / server}
    return {**told, "per_second": clients, **shares, "peak_mb": memory}


if __name__ == "__main__":
    count, together, seconds = sys.argv[1:]
    print(json.dumps(measure(int(count), int(together), float(seconds)), indent=2))
