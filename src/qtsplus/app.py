"""`qtsplus app`: a page on which people ask about a film, and see in it what each answer rests on."""

import os
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
# By their names alone: a font of Google's would be fetched from there.
_FONTS: Any = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
_THEME = gr.themes.Base(primary_hue="amber", neutral_hue="slate", radius_size="lg", font=_FONTS, font_mono="monospace")
_HEADER = """# Ask a film
It is read once. For each question the model keeps the few visual tokens that matter, and the film shows which."""
_SHARE = "As a share of all, in percent. At 0 the model decides."


class Stopped(Exception):
    """Somebody pressed Stop."""


@dataclass(eq=False)
class Visit:
    """What the server holds for one open page: its film, and whether Stop was pressed since the last request."""

    film: session.EncodedVideo | None = None
    path: str | None = None
    stop: Event = field(default_factory=Event)


class _Stoppable(StoppingCriteria):
    """The model, for one visit: Stop ends its work between two pieces of a film, or after a token."""

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
    What the page's buttons do. All visits share one model, which works for one of them at a time; others wait in line.

    Args:
        model, processor: as [`session.load`] gives them.
        max_new_tokens: longest answer.
    """

    def __init__(self, model: Any, processor: Any, max_new_tokens: int = 128) -> None:
        self.model, self.processor, self.max_new_tokens = model, processor, max_new_tokens

    def begin(self, visit: Visit | None) -> Visit:
        """Comes before a request waits in line, where Stop may already find it."""
        visit = visit or Visit()
        visit.stop.clear()
        return visit

    def stop(self, visit: Visit | None) -> None:
        if visit is not None:
            visit.stop.set()

    def read(self, path: str | None, visit: Visit) -> dict[str, Any]:
        """Encodes a film that was dropped; it takes the place of the one before."""
        visit.film = visit.path = None
        if path is None:
            return {}
        try:
            visit.film = session.encode(_Stoppable(self.model, visit.stop), self.processor, path)
        except Stopped:
            return {"error": "Stopped before the film was read. Drop it again to ask about it."}
        except ValueError as error:
            return {"error": str(error).replace(path, Path(path).name)}
        visit.path = path
        return _stage(visit)

    def ask(self, first: str, second: str, share: float, visit: Visit) -> dict[str, Any]:
        """Answers one question, or two beside each other."""
        if visit.film is None:
            return {"error": "There is no film yet: drop one first."}
        questions = [question for question in (first, second) if question.strip()]
        if not questions:
            return _stage(visit, error="The question is empty: write one.")
        model = _Stoppable(self.model, visit.stop)
        options: dict[str, Any] = {"retention": share / 100 or None, "max_new_tokens": self.max_new_tokens}
        try:
            answers = [session.ask(model, self.processor, visit.film, question, **options) for question in questions]
        except Stopped:
            return _stage(visit, error="Stopped.")
        except ValueError as error:
            return _stage(visit, error=str(error))
        panes = [_pane(*pair, visit.film) for pair in zip(questions, answers, strict=True)]
        return _stage(visit, answers=panes)


def _stage(visit: Visit, **more: Any) -> dict[str, Any]:
    """What app.js draws: a film, what is known of it, and either new answers or what went wrong."""
    film = visit.film
    assert film is not None and visit.path is not None
    frames = f"{len(film.metadata.frames_indices)} frames read in {film.seconds:.1f} s"
    return {
        "film": {"path": visit.path, "meta": {"_type": "gradio.FileData"}},  # Gradio adds its address
        "facts": f"{Path(visit.path).name} · {frames} · {len(film.features):,} visual tokens",
        "warnings": film.warnings,
        **more,
    }


def _pane(question: str, answer: session.Answer, film: session.EncodedVideo) -> dict[str, Any]:
    """An answer; its kept tokens are counted through all grid steps, row by row."""
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
    # A film stays for a day after its visit, unless the server ends before.
    with gr.Blocks(title="QTSplus", analytics_enabled=False, delete_cache=(3600, 86400)) as blocks:
        visit = gr.State()
        gr.Markdown(_HEADER)
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                label = f"A film, of at most {LARGEST_FILM[:-2]} GB"
                film = gr.File(label=label, file_types=["video"], height=130, elem_id="film")
                first = gr.Textbox(label="Question", placeholder="What is in the yellow ring?", elem_id="first")
                second = gr.Textbox(label="A second one, beside it", placeholder="May stay empty", elem_id="second")
                share = gr.Slider(0, 100, 0, step=1, label="Tokens to keep", info=_SHARE, elem_id="share")
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", min_width=80, scale=2, elem_id="ask")
                    stop = gr.Button("Stop", min_width=80, elem_id="stop")
            with gr.Column(scale=7, min_width=320):
                frame = "<div class='stage'></div>"
                stage = gr.HTML({}, html_template=frame, js_on_load=_SCRIPT.read_text("utf-8"), elem_id="stage")
        at_once: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        in_line: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
        reading = gr.on([film.upload, film.clear], page.begin, visit, visit, **at_once)
        reading.then(page.read, [film, visit], stage, **in_line)
        asking = gr.on([ask.click, first.submit, second.submit], page.begin, visit, visit, **at_once)
        asking.then(page.ask, [first, second, share, visit], stage, **in_line)
        stop.click(page.stop, visit, **at_once)
    return blocks.queue(api_open=False)


def launch(page: Page, host: str | None = None, port: int | None = None) -> None:
    """
    Serves the page until it is interrupted. Nothing is fetched from another machine, or told to one.

    Args:
        host: where to listen; this machine alone when absent, or what GRADIO_SERVER_NAME says, as on a Space.
        port: the first free one from 7860 when absent.
    """
    with tempfile.TemporaryDirectory(prefix="qtsplus-app-") as films:
        os.environ["GRADIO_TEMP_DIR"] = films
        build(page).launch(
            server_name=host,
            server_port=port,
            max_file_size=LARGEST_FILM,
            theme=_THEME,
            css=_STYLE.read_text("utf-8"),
            footer_links=[],
            run_history=False,
            ssr_mode=False,
        )
