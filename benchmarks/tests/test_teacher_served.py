"""The wire against a server that others wrote: `transformers serve` with a tiny model, in a process of its own."""

import asyncio
import contextlib
import importlib.util
import json
from functools import partial

import pytest

from benchmarks.speed.shapes import write_stock
from benchmarks.synthesis.endpoint import Endpoint
from benchmarks.synthesis.engine import Item, ItemFailed, Job, Ledger, run_job
from benchmarks.synthesis.questions import write_questions
from benchmarks.synthesis.video_steps import VideoTeacher, screen, write_answers
from qtsplus.data.records import Caption, Choice
from server_process import running_server

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(model, log):
    """A server with one model; ends with the block."""
    # As the console script `transformers serve` does.
    program = "from transformers.cli.transformers import main; main()"
    options = ["serve", str(model), "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu"]
    with running_server(log, "-c", program, *options) as port:
        yield f"http://127.0.0.1:{port}/v1"


def choices(count):
    options = {"A": "red", "B": "blue", "C": "green", "D": "grey"}
    for number in range(count):
        question = f"What colour is the circle number {number}?"
        yield Choice(vision_id="clip.mp4", id=str(number), question=question, options=options, answer="A")


def test_every_step_speaks_with_transformers_serve(tmp_path, tiny_published, tiny_mp4):
    assert importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn")
    model = tmp_path / "stock"
    write_stock(tiny_published, model)
    with serving(model, tmp_path / "server.log") as url:
        # A tiny model writes no JSON.
        endpoint = Endpoint(url, str(model), timeout=120.0, retries=2, extra_body={"max_tokens": 24})
        ledger = Ledger()

        async def write():
            async with endpoint:
                caption = Caption(vision_id="clip.mp4", caption="A red circle moves to the left.")
                with pytest.raises(ItemFailed):
                    await write_questions(endpoint, Item(0, "0", caption), ledger)

        asyncio.run(write())
        assert ledger.costs["requests"] == 3
        assert ledger.costs["prompt_tokens"] > 100 and ledger.costs["completion_tokens"] > 0
        assert sum("holds no JSON object" in reason for reason in ledger.reasons) == 3

        teacher = VideoTeacher(Endpoint(url, str(model), timeout=120.0), lambda name: str(tiny_mp4), 2, max_tokens=12)

        def job(name, step):
            return Job(name, lambda: choices(3), partial(step, teacher), teacher.endpoint, teacher.settings())

        for name, step in (("vscq2", screen), ("vqa", write_answers)):
            run_job(job(name, step), tmp_path / name, concurrency=2)
            summary = json.loads((tmp_path / name / "summary.json").read_text())
            assert (summary["finished"], summary["failed"], summary["kept"] + summary["dropped"]) == (3, 0, 3)
        assert summary["prompt_tokens"] > 50
