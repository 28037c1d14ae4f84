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

    def __init__(
        self,
        stream: Stream,
        name: str,
        address: str,
        question: str,
        tell: Callable[[], None],
    ):
        super().__init__(daemon=True, name=f"qtsplus-mcp {name}")
        self.stream = stream
        self.sources = {name: address}
        self.question = question
        self.tell = tell
        self.last: Answer | None = None
        self.ended: str | None = None
        self.is_stopped = False  # the thread sees it with the next answer

    def run(self) -> None:
        stream = self.stream
        try:
            answers = watch(
                stream.model,
                stream.processor,
                self.sources,
                self.question,
                every=EVERY,
                timeout=PATIENCE,
                stream=stream,
            )
            for answer in answers:
                if self.is_stopped:
                    return
                earlier = self.last
                self.last = answer
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

    def __init__(
        self,
        model,
        processor,
        sources: Mapping[str, str],
        work: Callable[..., Awaitable],
    ):
        self.model = model
        self.processor = processor
        self.sources = sources
        self.work = work
        self.watches: dict[str, Watch] = {}
        self.bus = InMemorySubscriptionBus()
        self.tools: list[Callable] = []
        if sources:
            self.tools = [self.watch_start, self.watch_ask, self.watch_stop]
        self.resources = []
        for name in sources:
            newest = partial(self.told, name)
            resource = FunctionResource(uri=_uri(name), name=name, mime_type="application/json", fn=newest)
            self.resources.append(resource)

    async def watch_start(self, source: SourceName, question: Question) -> dict[str, Any]:
        """Watches a source for a question. The resource watch://SOURCE is its newest answer, and tells of changes."""
        updated = ResourceUpdated(uri=_uri(source))
        loop = asyncio.get_running_loop()

        def start() -> None:
            if source not in self.sources or source in self.watches:
                free = list(self.sources)
                raise ValueError(f"{source!r} cannot be begun; expected one of {free} that is not watched.")
            stream = Stream(self.model, self.processor, question=question)
            watch = Watch(stream, source, self.sources[source], question, tell)
            self.watches[source] = watch
            watch.start()

        def tell() -> None:
            if not loop.is_closed():
                asyncio.run_coroutine_threadsafe(self.bus.publish(updated), loop)

        await self.work(start)
        return self.told(source)

    async def watch_ask(
        self, source: SourceName, question: Annotated[str, Field(max_length=2000)] = ""
    ) -> dict[str, Any]:
        """The newest answer; or that to another question, about what is remembered of the source."""
        watch = self._watch(source)
        if not question:
            return self.told(source)
        answer = await self.work(lambda: watch.stream.ask(question))
        told = self.told(source)
        told["answer"] = answer.as_dict()
        return told

    async def watch_stop(self, source: SourceName) -> dict[str, Any]:
        """Ends watching a source, and forgets what was remembered of it."""
        self._watch(source).is_stopped = True
        del self.watches[source]
        return self.told(source)

    def _watch(self, source: str) -> Watch:
        if source not in self.watches:
            watched = list(self.watches)
            raise ToolError(f"{source!r} is not watched; expected one of {watched}, or watch_start.")
        return self.watches[source]

    def told(self, source: str) -> dict[str, Any]:
        """The newest answer to the question that a source is watched for, and why it has ended if it has."""
        watch = self.watches.get(source)
        if watch is None:
            return {"watched": False, "question": None, "answer": None, "ended": None}
        answer = None
        if watch.last is not None:
            answer = watch.last.as_dict()
        return {"watched": True, "question": watch.question, "answer": answer, "ended": watch.ended}


def _uri(source: str) -> str:
    return f"watch://{source}"
