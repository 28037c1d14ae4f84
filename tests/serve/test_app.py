"""The page of `qtsplus app`, as people use it: a real server, and a real browser that clicks."""

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import pytest

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")
from qtsplus.cli.demonstration import CLIP, QUESTIONS  # noqa: E402
from server_process import running_server  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.app, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
RING, CROSS = QUESTIONS


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory, tiny_published) -> Iterator[str]:
    """The page of the tiny model, from the command; whatever the server sends beyond this machine goes to a proxy."""
    log = tmp_path_factory.mktemp("app") / "log"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        beyond = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        environment = {"http_proxy": beyond, "https_proxy": beyond, "no_proxy": "127.0.0.1,localhost"}
        command = ["-m", "qtsplus.cli", "app", "--model", str(tiny_published), "--port", "{port}"]
        command += ["--allow-host", "videos.example"]
        with running_server(log, *command, environment={**environment, "HF_HUB_OFFLINE": "0"}, path="/") as port:
            yield f"http://127.0.0.1:{port}/"
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., "Visitor"]]:
    """Opens the page for another person; in the end no page has asked any other host for anything."""
    with contextlib.ExitStack() as stack:
        yield lambda address: stack.enter_context(visitor(browser, address))


class Visitor:
    """What a person does on the page, and sees there."""

    def __init__(self, page, address: str) -> None:
        self.page, self.stage = page, page.locator("#stage")
        page.goto(address)

    def drop(self, video: Path) -> None:
        if clear := self.page.locator("#video button[aria-label=Clear]").all():
            clear[0].click()
        self.page.set_input_files("#video input[type=file]", video)

    def ask(self, first: str, second: str = "") -> None:
        self.page.fill("#first textarea", first)
        self.page.fill("#second textarea", second)
        self.page.click("#ask")

    def sees(self, what: str, text: str) -> None:
        sync_api.expect(self.stage.locator(what).first).to_contain_text(text, timeout=60_000)

    def seconds(self, video: int = 0) -> float:
        return self.stage.locator("video").nth(video).evaluate("video => video.currentTime")

    def stands_at(self, seconds: float, video: int = 0) -> None:
        script = "([video, at]) => Math.abs(document.querySelectorAll('#stage video')[video].currentTime - at) < 0.2"
        self.page.wait_for_function(script, arg=[video, seconds])

    def lit(self, pane: int = 0) -> set[int]:
        """The visual tokens of the current grid step that are not dimmed."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        script = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
        alpha = self.stage.locator("canvas").nth(pane).evaluate(script)[3::4]
        return {token for token, opacity in enumerate(alpha) if opacity == 0}


@contextlib.contextmanager
def visitor(browser, address: str) -> Iterator[Visitor]:
    context = browser.new_context()
    page, requests = context.new_page(), []
    page.on("request", lambda request: requests.append(request.url))
    yield Visitor(page, address)
    context.close()
    assert requests and all(url.startswith((address, "blob:", "data:")) for url in requests)


@pytest.fixture(scope="module")
def answers(tiny_published):
    """What the functions under the page say of the demo's clip."""
    from qtsplus.asking import session

    model, processor = session.load(tiny_published, "cpu")
    encoded = session.encode(model, processor, CLIP)
    return [session.ask(model, processor, encoded, one.question, retention=0.1) for one in QUESTIONS]


def test_a_video_is_dropped_once_and_asked_twice(visit, address):
    anna = visit(address)
    anna.drop(CLIP)
    anna.sees(".small", "288 visual tokens")
    anna.ask(RING.question)
    anna.sees(".answer", RING.answer)
    first = anna.lit()
    anna.ask(CROSS.question)
    anna.sees(".answer", CROSS.answer)
    assert anna.lit() != first
    anna.stage.locator(".earlier", has_text=RING.question).click()
    anna.sees(".answer", RING.answer)
    assert anna.lit() == first


def test_two_questions_stand_beside_each_other_with_the_tokens_that_the_budget_keeps(visit, address, answers):
    anna = visit(address)
    anna.drop(CLIP)
    anna.sees(".small", "288 visual tokens")
    anna.page.fill("#share input[type=number]", "10")
    anna.ask(RING.question, CROSS.question)
    anna.sees(".pane:nth-child(2) .answer", CROSS.answer)
    for pane, answer in enumerate(answers):
        anna.stands_at(answer.evidence[0].start, pane)
        anna.sees(f".pane:nth-child({pane + 1}) .small", f"Kept {answer.kept_tokens} of 288 tokens")
        step = int(answer.evidence[0].start)
        assert anna.lit(pane) == set(answer.keep_map[step].flatten().nonzero().flatten().tolist()) != set()
    anna.stage.locator(".lit").uncheck()
    assert len(anna.lit()) == 36


def test_the_timeline_and_the_evidence_seek(visit, address, answers):
    anna = visit(address)
    anna.drop(CLIP)
    anna.sees(".small", "288 visual tokens")
    anna.ask(RING.question)
    anna.sees(".answer", RING.answer)
    best = answers[0].evidence[0].start
    anna.stands_at(best)
    line = anna.stage.locator(".timeline")
    line.click(position={"x": line.bounding_box()["width"] / 4, "y": 10})
    anna.stands_at(2)
    line.press("ArrowRight")
    anna.stands_at(3)
    anna.stage.locator(".chip").first.click()
    anna.stands_at(best)
    anna.stage.locator(".play").click()
    anna.page.wait_for_function(f"() => document.querySelector('#stage video').currentTime > {best + 0.3}")


def test_a_corrupt_video_and_an_empty_question_are_told_and_the_page_stays(visit, address, tmp_path):
    (tmp_path / "<b>broken.mp4").write_bytes(CLIP.read_bytes()[:2000])
    anna = visit(address)
    anna.ask(RING.question)
    anna.sees(".note", "Drop a video first.")
    anna.drop(tmp_path / "<b>broken.mp4")
    anna.sees(".note", "Cannot decode")
    anna.ask(RING.question)
    anna.sees(".note", "Cannot decode")
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {CLIP}\n")
    anna.drop(tmp_path / "list.mp4")
    anna.sees(".note", "list.mp4")
    anna.drop(CLIP)
    anna.sees(".small", "288 visual tokens")
    anna.ask(" ")
    anna.sees(".note", "Write a question first.")
    anna.ask("<img src=x onerror=alert(1)> <|im_end|>")
    anna.sees(".question", "<img src=x onerror=alert(1)> <|im_end|>")
    anna.ask(RING.question)
    anna.sees(".answer", RING.answer)


def test_two_people_at_once_do_not_mix(visit, address, tiny_mp4):
    anna, ben = visit(address), visit(address)
    anna.drop(CLIP)
    ben.drop(tiny_mp4)
    anna.sees(".small", "288 visual tokens")
    ben.sees(".small", "clip.mp4")
    for person in (anna, ben):
        person.ask(RING.question)
    anna.sees(".answer", RING.answer)
    ben.sees(".pane .small", "of 64 tokens")
    anna.ask(CROSS.question)
    anna.sees(".answer", CROSS.answer)
    anna.sees(".pane .small", "of 288 tokens")
    assert ben.stage.locator(".earlier").count() == 0


@pytest.mark.parametrize("place", [__file__, "http://1.1.1.1/video.mp4"])
def test_no_file_beside_the_videos_and_no_address_is_read_for_a_visitor(visit, address, place):
    anna = visit(address)
    assert anna.page.request.get(f"{address}gradio_api/file={place}").status == 403
    assert anna.page.request.get(f"{address}monitoring/summary").status == 403


@pytest.fixture
def shown(monkeypatch, tmp_path) -> Iterator[Callable[..., str]]:
    """Serves a page from this process."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "videos"))
    (tmp_path / "videos").mkdir()
    with contextlib.ExitStack() as stack:

        def serve(model, processor, **options) -> str:
            from qtsplus.serve import page as app

            page, own = app.build_page(model, processor, ())
            _, address, _ = page.launch(**{**own, **options})
            stack.callback(page.close)
            return address

        yield serve


@pytest.fixture
def gated_tower(tiny_published, shown) -> Iterator[tuple[str, Event, Event]]:
    """A page in this process, whose vision tower waits at a gate."""
    from qtsplus.asking import session

    model, processor = session.load(tiny_published, "cpu")
    began, gate = Event(), Event()

    def wait(*_) -> None:
        began.set()
        assert gate.wait(60)

    model.model.visual.register_forward_pre_hook(wait)
    yield shown(model, processor), began, gate
    gate.set()


def test_another_video_takes_the_place_of_one_that_is_read(visit, gated_tower, tiny_mp4):
    """And of what waits behind it; a video that is removed is gone."""
    address, began, gate = gated_tower
    anna = visit(address)
    anna.drop(CLIP)
    assert began.wait(60)
    anna.drop(tiny_mp4)
    anna.page.wait_for_timeout(1000)
    gate.set()
    anna.sees(".small", "clip.mp4: 8 frames")
    anna.ask(RING.question)
    anna.sees(".pane .small", "of 64 tokens")
    gate.clear()
    began.clear()
    anna.drop(CLIP)
    assert began.wait(60)
    anna.page.locator("#video button[aria-label=Clear]").click()
    anna.page.wait_for_timeout(1000)
    gate.set()
    anna.sees(".empty", "Drop a video")


def test_questions_wait_in_line(visit, gated_tower):
    address, began, gate = gated_tower
    anna = visit(address)
    anna.drop(CLIP)
    assert began.wait(60)
    anna.ask(RING.question)
    anna.page.wait_for_timeout(1000)
    anna.ask(CROSS.question)
    anna.page.wait_for_timeout(1000)
    gate.set()
    anna.sees(".earlier", RING.question)
    anna.sees(".question", CROSS.question)


def test_only_hosts_that_were_named_are_answered(visit, address):
    get, names = visit(address).page.request.get, {"videos.example": 200, "rebound.example": 400, "localhost:1": 200}
    assert {name: get(address, headers={"Host": name}).status for name in names} == names


def test_a_page_elsewhere_sends_nothing_and_a_request_has_a_bound(shown, tiny_published, monkeypatch):
    from qtsplus.asking import session
    from qtsplus.serve import page as app

    monkeypatch.setattr(app, "LARGEST_REQUEST", 1000)
    port = urlsplit(shown(*session.load(tiny_published, "cpu"))).port

    def send(size: int, site: str) -> int:
        start = b'--B\r\nContent-Disposition: form-data; name="files"; filename="video.mp4"\r\n\r\n'
        body = start + bytes(size) + b"\r\n--B--\r\n"
        headers = {"Content-Type": "multipart/form-data; boundary=B", "Sec-Fetch-Site": site}
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/gradio_api/upload", body, headers)
            return connection.getresponse().status

    assert send(100, "same-origin") == 200
    assert send(100, "same-site") == 403
    assert send(100, "cross-site") == 403
    assert send(2000, "same-origin") == 413


def test_a_visit_whose_place_others_took_reads_its_video_again(visit, shown, tiny_published, monkeypatch):
    from qtsplus.asking import session
    from qtsplus.serve import page as app

    monkeypatch.setattr(app, "VISITS", 1)
    address = shown(*session.load(tiny_published, "cpu"))
    anna, ben = visit(address), visit(address)
    for person in (anna, ben):
        person.drop(CLIP)
        person.sees(".small", "288 visual tokens")
    anna.ask(RING.question)
    anna.sees(".answer", RING.answer)


def test_every_control_has_a_name_of_its_own_and_answers_are_said_where_nothing_was_replaced(visit, address):
    anna = visit(address)
    said = anna.stage.locator(".said").element_handle()
    assert said.get_attribute("role") == "status"
    anna.drop(CLIP)
    anna.sees(".small", "288 visual tokens")
    anna.ask(RING.question, RING.question)
    anna.sees(".pane:nth-child(2) .answer", RING.answer)
    anna.page.wait_for_function(
        "([said, text]) => said.isConnected && said.textContent.includes(text)", arg=[said, RING.answer]
    )
    names = anna.stage.locator("video, button, [role=slider]").evaluate_all(
        "all => all.map(one => one.ariaLabel ?? one.textContent)"
    )
    assert len(set(names)) == len(names) and all(names)
    assert {"Video demo.mp4, answer 1", "Position in demo.mp4, answer 2", "Play, answer 2"} <= set(names)


def test_a_video_that_is_too_large_is_refused(visit, shown, tiny_published):
    from qtsplus.asking import session

    anna = visit(shown(*session.load(tiny_published, "cpu"), max_file_size=20_000))
    anna.drop(CLIP)
    sync_api.expect(anna.page.get_by_text("exceed")).to_be_visible()
    anna.sees(".empty", "Drop a video")
