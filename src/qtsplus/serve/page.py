"""`qtsplus app`: a page on which people ask about a video, and see in it what each answer rests on."""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import safehttpx
from starlette.middleware import Middleware

from ..asking.session import Answer, VideoSession
from ..common.files import counted
from ..data.media import VIDEO_SUFFIXES
from ..video.encoded import FAILURES
from .guard import Guard

LARGEST_VIDEO = 10**9  # bytes
LARGEST_REQUEST = LARGEST_VIDEO + 10**6  # bytes: an uploaded video with its form
VIDEO_AGE = 86400  # seconds after which an uploaded video is removed
VISITS = 64  # the most visits whose videos stay in memory; for others the video is read again
_HERE = Path(__file__)
_STYLE = _HERE.with_suffix(".css")
_SCRIPT = _HERE.with_suffix(".js")
# By their names alone: a font of Google's would be fetched from there.
_FONTS: Any = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
_THEME = gr.themes.Base(primary_hue="amber", neutral_hue="slate", radius_size="lg", font=_FONTS, font_mono="monospace")
_HEADER = """# Ask a video
It is read once. For each question the model keeps the few visual tokens that matter, and the video shows which."""
_VIDEO = "A video of at most 1 GB"
_SHARE = "As a share of all, in percent. At 0 the model decides."


class Visit:
    """One open page: its video and conversation, and the work behind its buttons; all visits share the model."""

    def __init__(self, model, processor) -> None:
        self.path = ""  # of the video on the page
        self.problem = ""  # why it cannot be read
        self.session = VideoSession(model, processor)

    def read(self, path: str | None) -> dict:
        """Forgets the previous video, and encodes the new one if there is one."""
        for name in self.session.names:
            self.session.remove(name)
        self.path = path or ""
        self.problem = ""
        try:
            if path is not None:
                self.session.add(path, device="cpu")  # the model's device may have no room for the videos of all visits
        except FAILURES as error:
            self.problem = str(error).replace(self.path, Path(self.path).name)
            return self.stage(error=self.problem)
        return self.stage()

    def ask(
        self,
        path: str | None,
        first: str,
        second: str,
        share: float,
    ) -> dict:
        """Answers one question, or two beside each other, about the video on the page."""
        questions = [question for question in (first, second) if question.strip()]
        if path and not self.path:  # other visits took the place of this one
            self.read(path)
        if not self.session.names:
            return self.stage(error=self.problem or "Drop a video first.")
        if not questions:
            return self.stage(error="Write a question first.")
        try:
            answers = self.session.ask_many(questions, retention=share / 100 or None)
        except FAILURES as error:
            return self.stage(error=str(error))
        return self.stage([self._pane(*pair) for pair in zip(questions, answers, strict=True)])

    def stage(
        self,
        answers: list[dict] | None = None,
        error: str | None = None,
    ) -> dict:
        """The content for page.js: the video and what is known of it, with new answers or with an error."""
        facts = "Drop a video to begin."
        videos = {}
        warnings = []
        for name, video in self.session.videos.items():  # there is one at most
            frames = counted(video.frames, "frame")
            facts = f"{name}: {frames} read, {len(video.features):,} visual tokens."
            warnings = video.about.warnings
            # Gradio adds the address of a file in what goes to page.js.
            videos[name] = {"path": self.path, "meta": {"_type": "gradio.FileData"}}
        return {
            "about": self.path,
            "videos": videos,
            "facts": facts,
            "warnings": warnings,
            "answers": answers,
            "error": error,
        }

    def _pane(self, question: str, answer: Answer) -> dict:
        """An answer; the tokens that it kept of a video are counted through all grid steps, row by row."""
        count = answer.kept_tokens
        total = answer.visual_tokens
        maps = {}
        for name, keep_map in answer.keep_maps.items():
            video = self.session.videos[name]
            maps[name] = {
                "grid": list(keep_map.shape),
                "kept": keep_map.flatten().nonzero().flatten().tolist(),
                "edges": video.edges.tolist(),
                "end": video.about.start + video.length,
            }
        pane = answer.as_dict()
        pane["question"] = question
        pane["facts"] = f"Kept {count:,} of {total:,} tokens ({count / total:.1%})."
        pane["maps"] = maps
        return pane


def build_page(model, processor, hosts: Sequence[str]):
    """The page of [`launch`], and how Gradio is to serve it. What visitors drop goes to GRADIO_TEMP_DIR."""

    def read(visit: Visit | None, path: str | None) -> tuple[dict, Visit]:
        visit = visit or Visit(model, processor)
        return visit.read(path), visit

    def answer(visit: Visit | None, *fields) -> tuple[dict, Visit]:
        visit = visit or Visit(model, processor)
        return visit.ask(*fields), visit

    with gr.Blocks(title="QTSplus", analytics_enabled=False, fill_width=True, delete_cache=(3600, VIDEO_AGE)) as blocks:
        visit = gr.State()
        gr.Markdown(_HEADER)
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                video = gr.File(label=_VIDEO, file_types=list(VIDEO_SUFFIXES), height=160, elem_id="video")
                first = gr.Textbox(label="Question", placeholder="What is in the yellow ring?", elem_id="first")
                second = gr.Textbox(label="A second one, beside it", placeholder="May stay empty", elem_id="second")
                share = gr.Slider(0, 100, 0, step=1, label="Tokens to keep", info=_SHARE, elem_id="share")
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
            with gr.Column(scale=7, min_width=320):
                empty = Visit(model, processor).stage()
                frame = "<div class='said' role='status'></div><div class='stage'></div>"
                stage = gr.HTML(empty, html_template=frame, js_on_load=_SCRIPT.read_text("utf-8"), elem_id="stage")
        # "multiple", or else what comes while another is served would be dropped.
        in_line = {
            "trigger_mode": "multiple",
            "api_visibility": "private",
            "concurrency_limit": 1,
            "concurrency_id": "model",
        }
        shown = [stage, visit]
        gr.on([video.upload, video.clear], read, [visit, video], shown, **in_line)
        fields = [visit, video, first, second, share]
        gr.on([ask.click, first.submit, second.submit], answer, fields, shown, scroll_to_output=True, **in_line)
    guard = Middleware(Guard, hosts=hosts, largest=LARGEST_REQUEST, own_pages=True)
    options = {
        "max_file_size": LARGEST_VIDEO,
        "theme": _THEME,
        "css": _STYLE.read_text("utf-8"),
        "footer_links": [],
        "run_history": False,
        "state_session_capacity": VISITS,
        "ssr_mode": False,
        "quiet": True,
        "app_kwargs": {"middleware": [guard]},
        "enable_monitoring": False,
        "prevent_thread_lock": True,
    }
    return blocks.queue(api_open=False), options


async def _refuse(host: str) -> str:
    """Gradio asks this whether it may fetch an address that a visitor names, which it does for any public one."""
    raise ValueError(f"Nothing is fetched from {host}.")


def launch(
    model,
    processor,
    *,
    host: str,
    port: int,
    allow_hosts: Sequence[str] = (),
    say: Callable[[str], object] = print,
) -> None:
    """
    Serves the page until it is interrupted. Nothing is fetched from another machine, or told to one.

    Args:
        host, port: where to listen.
        allow_hosts: names of this machine that browsers may use, beside `host` and localhost; `*` for all.
        say: takes the page's address.
    """
    safehttpx.async_validate_url = _refuse
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the videos are removed then too
    with tempfile.TemporaryDirectory(prefix="qtsplus-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        page, options = build_page(model, processor, [host] + list(allow_hosts))
        _, address, _ = page.launch(server_name=host, server_port=port, **options)
        say(f"The page is at {address}")
        page.block_thread()
