"""`qtsplus app`: a page on which people ask about a film, and see in it what each answer rests on."""

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import safehttpx
import torch
from transformers import StoppingCriteria

from .data.media import VIDEO_SUFFIXES
from .library import Library
from .output import printable
from .session import Answer, VideoSession

LARGEST_FILM = "1gb"
VISITS = 64  # whose films are held at a time; who comes after takes the place of the oldest
FAILURES = (ValueError, torch.OutOfMemoryError)  # of one request, and the page goes on
_HERE = Path(__file__)
_STYLE, _SCRIPT = _HERE.with_suffix(".css"), _HERE.with_suffix(".js")
# By their names alone: a font of Google's would be fetched from there.
_FONTS: Any = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
_THEME = gr.themes.Base(primary_hue="amber", neutral_hue="slate", radius_size="lg", font=_FONTS, font_mono="monospace")
_HEADER = """# Ask a film
It is read once. For each question the model keeps the few visual tokens that matter, and the film shows which."""
_FILM = f"A film, of at most {LARGEST_FILM[:-2]} GB"
_SHARE = "As a share of all, in percent. At 0 the model decides."


class _Stoppable(StoppingCriteria):
    """The model, for one visit: Stop ends its work between two pieces of a film, or after a token."""

    def __init__(self, model: Any, visit: "Visit") -> None:
        self._whole, self._visit = model, visit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self._visit.is_stopped, device=input_ids.device)

    def _check(self) -> None:
        if self._visit.is_stopped:
            raise ValueError("Stopped.")

    def encode_videos(self, *inputs: Any, **options: Any) -> Any:
        self._check()
        features = self._whole.encode_videos(*inputs, **options)
        self._check()
        return features

    def generate_from(self, prompt: Any, **options: Any) -> Any:
        self._check()
        output = self._whole.generate_from(prompt, **options, stopping_criteria=[self])
        self._check()
        return output


class Visit:
    """What the server holds for one open page, and does for its buttons; all visits share the model and the library."""

    def __init__(self, model: Any, processor: Any, library: Any, paths: Mapping[str, str]) -> None:
        self.begun = self.served = self.stopped = 0  # requests, which are served in turn; of those stopped the last
        self.path = ""
        own = _Stoppable(model, self)
        self.session, self.paths = VideoSession(own, processor), paths
        self.library = copy(library)
        if library is not None:
            self.library.model = own

    @property
    def is_stopped(self) -> bool:
        """Whether the request that is being served shall end."""
        return self.served < self.stopped

    def stop(self) -> None:
        """Ends the requests of this visit, and none that comes later."""
        self.stopped = self.begun

    def _serve(self, work: Callable[[], dict[str, Any]]) -> Any:
        try:
            result = work()
            return gr.skip() if self.is_stopped and self.served + 1 < self.begun else result  # the next is shown
        finally:
            self.served += 1

    def read(self, path: str | None) -> Any:
        """Forgets the film that was there, and encodes another if there is one."""
        return self._serve(lambda: self._read(path))

    def ask(self, first: str, second: str, share: float) -> Any:
        """Answers one question, or two beside each other."""
        return self._serve(lambda: self._ask(first, second, share))

    def _read(self, path: str | None) -> dict[str, Any]:
        for name in self.session.names:
            self.session.remove(name)
        self.path = path or ""
        try:
            if path is not None:
                self.session.add(path, device="cpu")  # the model's device may have no room for the films of all visits
        except FAILURES as error:
            return self.stage(error=str(error).replace(self.path, Path(self.path).name))
        return self.stage()

    def _ask(self, first: str, second: str, share: float) -> dict[str, Any]:
        questions = [question for question in (first, second) if question.strip()]
        if not (self.session.names or self.library):
            return self.stage(error="Drop a film first.")
        if not questions:
            return self.stage(error="Write a question first.")
        try:
            answers = self._answers(questions, retention=share / 100 or None)
        except FAILURES as error:
            text = str(error)
            return self.stage(error=text.replace(f"{self.library.folder}/", "") if self.library else text)
        return self.stage([self._pane(*pair) for pair in zip(questions, answers, strict=True)])

    def _answers(self, questions: list[str], **options: Any) -> list[Answer]:
        if self.library is None or self.session.names:
            return self.session.ask_many(questions, **options)
        return [self.library.ask(question, **options) for question in questions]

    def stage(self, answers: list[dict[str, Any]] | None = None, error: str | None = None) -> dict[str, Any]:
        """What app.js draws: the films and what is known of them, with new answers or with what went wrong."""
        facts = "Drop a film to begin."
        if self.library is not None:
            facts = f"Ask about the {len(self.library.names):,} films of the library, or drop one of your own."
        for name, film in self.session.videos.items():
            frames = f"{len(film.metadata.frames_indices)} frames read in {film.seconds:.1f} s"
            facts = f"{name}: {frames}, {len(film.features):,} visual tokens."
        paths = dict.fromkeys(self.session.names, self.path) or self.paths
        names = self.session.names or {span["video"] for answer in answers or () for span in answer["evidence"]}
        # Gradio adds the address of a file in what goes to app.js.
        kind = {"meta": {"_type": "gradio.FileData"}}
        films = {name: {"path": paths[name], **kind} if name in paths else None for name in names}
        warnings = [warning for film in self.session.videos.values() for warning in film.warnings]
        now = {"about": self.path, "films": films, "facts": facts, "warnings": warnings}
        return {**now, "answers": answers, "error": error}

    def _pane(self, question: str, answer: Answer) -> dict[str, Any]:
        """An answer; the tokens that it kept of a film are counted through all grid steps, row by row."""
        count, total, seconds = answer.kept_tokens, answer.visual_tokens, answer.timings
        facts = f"Kept {count:,} of {total:,} tokens ({count / total:.1%}); the first word took "
        facts += f"{seconds['first_token']:.2f} s, all of it {seconds['generate']:.2f} s."
        maps = {}
        for name, keep_map in answer.keep_maps.items():
            film = self.session.videos[name] if self.session.names else self.library._video(name)
            times = {"start": film.start, "step": film.second_per_grid_ts[0], "end": film.start + film.length}
            kept = keep_map.flatten().nonzero().flatten().tolist()
            maps[printable(name)] = {"grid": list(keep_map.shape), "kept": kept, **times}
        named = not self.session.names  # or else it is the only film
        fields = answer.as_dict()
        evidence = [{**one, "video": printable(one["video"])} for one in fields["evidence"]]
        shown = {"video": printable(answer.video), "evidence": evidence, "question": question, "facts": facts}
        return {**fields, **shown, "maps": maps, "named": named}


def build(model: Any, processor: Any, library: Library | None = None, media_root: Path | None = None) -> gr.Blocks:
    """The page of [`launch`]."""
    paths = {}
    if library is not None and media_root is not None:
        named = [name for name in library.names if printable(name) == name]  # others have no address
        paths = {name: str(Path(media_root, name).resolve()) for name in named}
        gr.set_static_paths(list(paths.values()))

    def begin(visit: Visit | None, reads: bool = False) -> Visit:
        """Before a request waits in line, where Stop may already find it. Another film ends what is about the last."""
        visit = visit or Visit(model, processor, library, paths)
        if reads:
            visit.stop()
        visit.begun += 1
        return visit

    # A film stays for a day after its visit, unless the server ends before.
    with gr.Blocks(title="QTSplus", analytics_enabled=False, fill_width=True, delete_cache=(3600, 86400)) as blocks:
        visit = gr.State()
        gr.Markdown(_HEADER)
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                film = gr.File(label=_FILM, file_types=[*VIDEO_SUFFIXES], height=160, elem_id="film")
                first = gr.Textbox(label="Question", placeholder="What is in the yellow ring?", elem_id="first")
                second = gr.Textbox(label="A second one, beside it", placeholder="May stay empty", elem_id="second")
                share = gr.Slider(0, 100, 0, step=1, label="Tokens to keep", info=_SHARE, elem_id="share")
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", min_width=80, scale=2, elem_id="ask")
                    stop = gr.Button("Stop", min_width=80, elem_id="stop")
            with gr.Column(scale=7, min_width=320):
                empty, frame = Visit(model, processor, library, paths).stage(), "<div class='stage'></div>"
                stage = gr.HTML(empty, html_template=frame, js_on_load=_SCRIPT.read_text("utf-8"), elem_id="stage")
        at_once: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        in_line: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
        for how in at_once, in_line:
            how["trigger_mode"] = "multiple"  # or else what comes while another is served would be dropped
        reading = gr.on([film.upload, film.clear], partial(begin, reads=True), visit, visit, **at_once)
        reading.then(Visit.read, [visit, film], stage, **in_line)
        asking = gr.on([ask.click, first.submit, second.submit], begin, visit, visit, **at_once)
        asking.then(Visit.ask, [visit, first, second, share], stage, scroll_to_output=True, **in_line)
        stop.click(lambda visit: visit and visit.stop(), visit, **at_once)
    return blocks.queue(api_open=False)


async def _refuse(host: str) -> str:
    """Gradio asks this whether it may fetch an address that a visitor names, which it does for any public one."""
    raise ValueError(f"Nothing is fetched from {host}.")


def launch(
    model: Any,
    processor: Any,
    library: Library | None = None,
    media_root: Path | None = None,
    *,
    host: str | None = None,
    port: int | None = None,
    say: Callable[[str], object] = print,
) -> None:
    """
    Serves the page until it is interrupted. Nothing is fetched from another machine, or told to one.

    Args:
        library: what a question is about while no film was dropped.
        media_root: the folder that the library was made of, whose films are played to everybody who sees the page.
        host: where to listen; this machine alone when absent, or what GRADIO_SERVER_NAME says, as on a Space.
        port: the first free one from 7860 when absent.
        say: takes the page's address.
    """
    safehttpx.async_validate_url = _refuse
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the films go then too
    with tempfile.TemporaryDirectory(prefix="qtsplus-app-") as films:
        os.environ["GRADIO_TEMP_DIR"] = films
        page = build(model, processor, library, media_root)
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            max_file_size=LARGEST_FILM,
            theme=_THEME,
            css=_STYLE.read_text("utf-8"),
            footer_links=[],
            run_history=False,
            state_session_capacity=VISITS,
            ssr_mode=False,
            quiet=True,
            prevent_thread_lock=True,
        )
        say(f"The page is at {address}")
        page.block_thread()
