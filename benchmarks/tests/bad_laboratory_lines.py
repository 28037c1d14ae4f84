"""Bad command lines of `python -m benchmarks`, in the words of `tests/bad_command_lines.py`."""

from bad_command_lines import LONG, NO_COUNTS, each_value, wrong


def synthesis_lines() -> list[list[str]]:
    server = ["--endpoint", "http://127.0.0.1:9/v1", "--teacher", "m"]
    addresses = (
        *("", "localhost:8000", "ftp://x/v1", "http://", "http://x:99999/v1", "http://x:0/v1", "http://x y/v1", LONG),
        *("http://[::1/v1", "http://user:word@x/v1", "http://x/v1?key=1", "http://\x00", "http://ü/v1"),
    )
    makers = {"vscq1": "{captions}", "vscq2": "{choices}", "vqa": "{choices}"}
    vscq1, vscq2, vqa = (["make", name, source, "--out", "{out}"] for name, source in makers.items())
    both, with_frames = [*vscq1, *server], [*vscq2, *server]
    return [
        *(["make", name, path, *both[3:]] for name in makers for path in ("{missing}", "{empty}", "{text}")),
        *each_value([*vscq1[:3], *server], "--out", ("", "{text}", "{text}/x", "\x00")),
        *each_value(both, "--concurrency", ("4097", *NO_COUNTS)),
        *wrong(both, "--limit"),
        *each_value(both, "--extra-body", ("", "3", "{{", "[" * 5000, "NaN")),
        *each_value([*vscq1, "--teacher", "m"], "--endpoint", addresses),
        *([*vqa, *some] for some in (server[2:], server[:2], [*server[:2], "--teacher="])),
        *([*both, *more] for more in (["--requests-per-minute", "5"], ["--frames", "2"], ["--media-root", "{frames}"])),
        *each_value(with_frames, "--frames", ("1000000000", *NO_COUNTS)),
        *each_value(with_frames, "--media-root", ("", "{missing}", "{text}")),
    ]


def speed_lines() -> list[list[str]]:
    lines: list[list[str]] = [["fast"]]
    for name in ("speed", "memory", "scaling"):
        speed = [name, "--shape", "tiny", "--out", "{out}"]
        lines += each_value([name, "--out", "{out}"], "--shape", ("", "99b", "CPU", "../3b", "3b,cpu", "тест"))
        lines += each_value(speed, "--repeats", ("0", "-1", "1.5", "nan", "abc", ""))
        lines += each_value(speed, "--device", ("toaster", "meta", "cuda:99", "", "🤖"))
    for name in ("speed", "memory"):
        speed = [name, "--shape", "tiny", "--out", "{out}"]
        lines += each_value(speed, "--retention", ("0", "-1", "1.1", "nan", "inf", "abc", ""))
        lines += each_value(speed, "--dtype", ("float8", "", "int8"))
    sizes = [["0", "5"], ["-1", "5"], ["5"], ["5", "5"], ["1.5", "2"], ["abc", "5"], ["nan", "5"]]
    lines += [
        ["scaling", "--shape", "tiny", "--out", "{out}", *(f"--size={value}" for value in pair)] for pair in sizes
    ]
    files = ("{missing}", "{records}", "{video}", "{empty}")
    return [*lines, *(["efficiency", path, "--out", "{out}"] for path in files), ["efficiency"]]


def rehearsal_lines() -> list[list[str]]:
    rehearsal = ["rehearsal", "--shape", "tiny", "--out", "{out}"]
    return [
        rehearsal,
        *each_value(rehearsal, "--work", ("{video}", "{frames}", "{model}", "/dev/null/x", "\x00", "", LONG)),
        *each_value(["rehearsal", "--work", "{out}", "--out", "{out}"], "--shape", ("", "99b", "3B", "cpu", "тест")),
        *each_value(
            ["rehearsal", "--work", "{out}", "--out", "{out}"], "--vocabulary", ("{missing}", "{video}", "", LONG)
        ),
    ]


def evaluate_lines() -> list[list[str]]:
    wrong = (
        ["--selection", "all", "--retention", "0.1"],
        ["--selection", "all", "--max-visual-tokens", "9"],
        ["--retention", "0.1", "--max-visual-tokens", "9"],
        ["--num-frames", "4", "--max-frames", "9"],
        ["--fps", "1", "--num-frames", "4"],
        ["--max-pixels", "-4"],
    )
    return [
        *(["train", path] for path in ("{missing}", "{video}", "{records}")),
        *(
            ["analysis", path, "--model", "{model}", "--work", "{out}", "--out", "{out}"]
            for path in ("", "{missing}", "{empty_folder}", "{video}", "{empty}", LONG)
        ),
        *(["report", path] for path in ("{missing}", "{empty_folder}", "{records}", LONG)),
        *(["evaluate", "--tasks", "lvbench", "--model", "{model}", *more] for more in wrong),
        ["evaluate"],
    ]


def laboratory_lines() -> list[list[str]]:
    return [*synthesis_lines(), *speed_lines(), *rehearsal_lines(), *evaluate_lines()]
