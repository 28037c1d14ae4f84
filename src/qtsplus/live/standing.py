"""Sources that an operator has named, which agents watch: begun, asked meanwhile, ended; each tells of changes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resources import FunctionResource
from mcp.server.subscriptions import InMemorySubscriptionBus, ResourceUpdated
from pydantic import Field

from ..asking.session import Answer
from ..common.files import first_line
from ..video.encoded import FAILURES
from .stream import Stream
from .watching import watch

EVERY = 5.0  # seconds of video from answer to answer
PATIENCE = 10.0  # seconds without a frame after which a source has failed, and a file has ended

SourceName = Annotated[str, Field(max_length=80, description="As the operator has called it.")]
Question = Annotated[str, Field(min_length=1, max_length=2000)]


class Watch(threading.Thread):
    """One source that is watched for a question; `tell` is called where the answer is another, and at the end."""

    def __init__(self, stream: Stream, name: str, address: str, question: str, tell: Callable[[], Any]):
        super().__init__(daemon=True, name=f"qtsplus-mcp {name}")
        self.stream, self.source, self.question, self.tell = stream, (name, address), question, tell
        self.last: Answer | None = None
        self.ended: str | None = None
        self.is_stopped = False  # as it sees with the next answer

    def run(self) -> None:
        what = self.stream.model, self.stream.processor, dict([self.source]), self.question
        try:
            for answer in watch(*what, every=EVERY, timeout=PATIENCE, stream=self.stream):
                if self.is_stopped:
                    return
                earlier, self.last = self.last, answer
                if earlier is None or earlier.answer != answer.answer:
                    self.tell()
            self.ended = "The source has ended."
        except FAILURES as error:
            self.ended = first_line(error)
        self.tell()


class Live:
    """
    The tools about the sources, by name their addresses, and a resource for each: `watch://NAME`, the newest answer.
    `work` awaits a function's result when it has its turn.
    """

    def __init__(self, model: Any, processor: Any, sources: Mapping[str, str], work: Callable[..., Awaitable[Any]]):
        self.model, self.processor, self.sources, self.work = model, processor, sources, work
        self.watches: dict[str, Watch] = {}
        self.bus = InMemorySubscriptionBus()
        self.tools: list[Callable[..., Any]] = [self.watch_start, self.watch_ask, self.watch_stop] if sources else []
        self.resources = [
            FunctionResource(uri=f"watch://{one}", name=one, mime_type="application/json", fn=partial(self.told, one))
            for one in sources
        ]

    async def watch_start(self, source: SourceName, question: Question) -> dict[str, Any]:
        """Watches a source for a question. The resource watch://SOURCE is its newest answer, and tells of changes."""
        updated, loop = ResourceUpdated(uri=f"watch://{source}"), asyncio.get_running_loop()

        def start() -> None:
            if source not in self.sources or source in self.watches:
                raise ValueError(f"{source!r} cannot be begun; expected one of {[*self.sources]} that is not watched.")
            stream = Stream(self.model, self.processor, question=question)

            def tell() -> Any:
                return loop.is_closed() or asyncio.run_coroutine_threadsafe(self.bus.publish(updated), loop)

            self.watches[source] = Watch(stream, source, self.sources[source], question, tell)
            self.watches[source].start()

        await self.work(start)
        return self.told(source)

    async def watch_ask(
        self, source: SourceName, question: Annotated[str, Field(max_length=2000)] = ""
    ) -> dict[str, Any]:
        """The newest answer; or that to another question, about what is remembered of the source."""
        watch = self._watch(source)
        answer = await self.work(lambda: watch.stream.ask(question)) if question else None
        return {**self.told(source), **({"answer": answer.as_dict()} if answer else {})}

    async def watch_stop(self, source: SourceName) -> dict[str, Any]:
        """Ends watching a source, and forgets what was remembered of it."""
        self._watch(source).is_stopped = True
        del self.watches[source]
        return self.told(source)

    def _watch(self, source: str) -> Watch:
        if source not in self.watches:
            raise ToolError(f"{source!r} is not watched; expected one of {[*self.watches]}, or watch_start.")
        return self.watches[source]

    def told(self, source: str) -> dict[str, Any]:
        """The newest answer to the question that a source is watched for, and why it has ended if it has."""
        watch = self.watches.get(source)
        last = watch.last.as_dict() if watch and watch.last else None
        question, ended = (watch.question, watch.ended) if watch else (None, None)
        return {"watched": watch is not None, "question": question, "answer": last, "ended": ended}
