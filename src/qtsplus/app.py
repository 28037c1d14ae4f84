"""`qtsplus app`: a page on which people ask about a film, and see in it what each answer rests on."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr
import torch
from transformers import StoppingCriteria

from . import session

LARGEST_FILM = "1gb"
_HERE = Path(__file__)
_STYLE, _SCRIPT = _HERE.with_suffix(".css"), _HERE.with_suffix(".js")
# Gradio's own theme would fetch its letters from another host.
_THEME = gr.themes.Soft(
    primary_hue="amber",
    neutral_hue="slate",
    font=["system-ui", "-apple-system", "Segoe UI", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)
_HEADER = """# Ask a film
It is read once. Each question keeps the few visual tokens that matter, and you see which."""


class Stopped(Exception):
    """Somebody pressed Stop."""


@dataclass(eq=False)
class Visit:
    """What the server holds for one open page: its film, and whether Stop was pressed since the last request."""

    film: session.EncodedVideo | None = None
    path: str | None = None
    stop: Event = field(default_factory=Event)


class _Stoppable(StoppingCriteria):
    """A model for one visit: Stop ends it between two pieces of a film, or after a token."""

    def __init__(self, model: Any, stop: Event) -> None:
        self.model, self.stop = model, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def encode_videos(self, *inputs: Any, **options: Any) -> Any:
        self.check()
        return self.model.encode_videos(*inputs, **options)

    def generate(self, **inputs: Any) -> Any:
        self.check()
        output = self.model.generate(**inputs, stopping_criteria=[self])
        self.check()
        return output


class Page:
    """
    The page's events. All visits share one model, which works for one of them at a time; the others wait in a queue.

    Args:
        model, processor: as [`session.load`] gives them.
        max_new_tokens: longest answer.
    """

    def __init__(self, model: Any, processor: Any, max_new_tokens: int = 128) -> None:
        self.model, self.processor, self.max_new_tokens = model, processor, max_new_tokens

    def begin(self, visit: Visit | None) -> Visit:
        """Before a request joins the queue, where Stop may already find it."""
        visit = visit or Visit()
        visit.stop.clear()
        return visit

    def stop(self, visit: Visit | None) -> None:
        if visit is not None:
            visit.stop.set()

    def read(self, path: str | None, visit: Visit) -> dict[str, Any]:
        """Encodes a film that was dropped, which takes the place of the one before."""
        visit.film = visit.path = None
        if path is None:
            return {}
        try:
            visit.film = session.encode(_Stoppable(self.model, visit.stop), self.processor, path)
        except Stopped:
            return {"error": "Stopped before the film was read. Drop it again to ask about it."}
        except ValueError as error:
            return {"error": f"{Path(path).name} cannot be read as a film: {str(error).replace(path, 'it')}"}
        visit.path = path
        return self._shown(visit)

    def ask(self, first: str, second: str, share: float, visit: Visit) -> dict[str, Any]:
        """Answers one question, or two beside each other."""
        if visit.film is None:
            return {"error": "There is no film yet: drop one first."}
        questions = [question for question in (first, second) if question.strip()]
        if not questions:
            return {**self._shown(visit), "error": "The question is empty: write one."}
        model, answers = _Stoppable(self.model, visit.stop), []
        try:
            for question in questions:
                answer = session.ask(
                    model,
                    self.processor,
                    visit.film,
                    question,
                    retention=share / 100 or None,
                    max_new_tokens=self.max_new_tokens,
                )
                answers.append(_pane(question, answer, visit.film))
        except Stopped:
            return {**self._shown(visit), "error": "Stopped."}
        except ValueError as error:
            return {**self._shown(visit), "error": str(error)}
        return {**self._shown(visit), "answers": answers}

    def _shown(self, visit: Visit) -> dict[str, Any]:
        film = visit.film
        assert film is not None and visit.path is not None
        return {
            "film": {"path": visit.path, "meta": {"_type": "gradio.FileData"}},
            "name": Path(visit.path).name,
            "facts": f"{len(film.metadata.frames_indices)} frames read in {film.seconds:.1f} s: "
            f"{len(film.features):,} visual tokens",
            "warnings": film.warnings,
        }


def _pane(question: str, answer: session.Answer, film: session.EncodedVideo) -> dict[str, Any]:
    """An answer as the script draws it; the kept tokens are counted through all grid steps, row by row."""
    return {
        **answer.as_dict(),
        "question": question,
        "grid": list(answer.keep_map.shape),
        "kept": answer.keep_map.flatten().nonzero().flatten().tolist(),
        "start": film.start,
        "seconds_per_step": film.second_per_grid_ts[0],
    }


def build(page: Page) -> gr.Blocks:
    """The page itself; see [`launch`]."""
    # The files of a visit go a day after it, and all when the server ends.
    with gr.Blocks(title="QTSplus", analytics_enabled=False, delete_cache=(3600, 86400)) as blocks:
        visit = gr.State()
        gr.Markdown(_HEADER)
        with gr.Row():
            with gr.Column(scale=5, min_width=340):
                stage = gr.HTML(
                    {}, html_template="<div class='stage'></div>", js_on_load=_SCRIPT.read_text(), elem_id="stage"
                )
            with gr.Column(scale=3, min_width=320):
                film = gr.File(
                    label=f"A film, of at most {LARGEST_FILM[:-2]} GB", file_types=["video"], height=120, elem_id="film"
                )
                first = gr.Textbox(label="Question", placeholder="What is in the yellow ring?", elem_id="first")
                second = gr.Textbox(
                    label="Another, beside it", placeholder="Leave it empty for one answer", elem_id="second"
                )
                share = gr.Slider(
                    0, 100, 0, step=1, label="Tokens to keep, %", info="0: the model decides", elem_id="share"
                )
                with gr.Row():
                    stop = gr.Button("Stop", elem_id="stop")
                    ask = gr.Button("Ask", variant="primary", elem_id="ask")
        one: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
        at_once: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        gr.on([film.upload, film.clear], page.begin, visit, visit, **at_once).then(
            page.read, [film, visit], stage, **one
        )
        gr.on([ask.click, first.submit, second.submit], page.begin, visit, visit, **at_once).then(
            page.ask, [first, second, share, visit], stage, **one
        )
        stop.click(page.stop, visit, **at_once)
    return blocks.queue(api_open=False)


def launch(page: Page, host: str | None = None, port: int | None = None) -> None:
    """
    Serves the page until it is interrupted. Nothing is fetched from, or told to, another machine.

    Args:
        host: where to listen; this machine alone when absent, or what GRADIO_SERVER_NAME says, as on a Space.
        port: the first free one from 7860 when absent.
    """
    with tempfile.TemporaryDirectory(prefix="qtsplus-app-"):
        build(page).launch(
            server_name=host,
            server_port=port,
            share=False,
            max_file_size=LARGEST_FILM,
            theme=_THEME,
            css=_STYLE.read_text(),
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            show_error=True,
        )
