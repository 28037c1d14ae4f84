"""
The model's own budget, which depends on the question and the video, where vLLM has to count tokens before it runs the
model: the processor asks the engine first. The engine keeps the features, so the tower still sees a video once.

`qtsplus serve` and `qtsplus batch --engine vllm` connect the two: [`BudgetWorker`] is vLLM's `--worker-extension-cls`,
and [`Connection`] its `--middleware`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from safetensors.torch import load, save


class BudgetWorker:
    """What a worker of vLLM can be asked beside its own methods."""

    get_model: Callable[[], Any]

    def qtsplus_budget(self, item: bytes) -> int | None:
        """As the model's `learned_budget`, for an item of [`ask_budget`]."""
        return self.get_model().learned_budget(load(item))


class Connection:
    """Around vLLM's server, as ASGI."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            engine, loop = scope["app"].state.engine_client, asyncio.get_running_loop()

            def call(method: str, args: tuple[Any, ...]) -> Any:  # in the thread where requests are prepared
                return asyncio.run_coroutine_threadsafe(engine.collective_rpc(method, args=args), loop).result()

            engine.renderer.get_mm_processor().call_engine = call
        await self.app(scope, receive, send)


def ask_budget(call_engine: Callable[..., Any], item: Any) -> int:
    """How many tokens the model would keep of a request, whose item [`processing.merged_item`] has made."""

    def ask(fields: dict[str, Any]) -> Any:
        return call_engine("qtsplus_budget", (save(fields),))[0]

    data = {name: value.contiguous() for name, value in item.get_data().items()}
    # Frames travel only where the engine does not have their features.
    n = ask({name: value for name, value in data.items() if name != "pixel_values_videos"})
    return ask(data) if n is None else n
