"""Lines that say what is being done where nothing else is printed."""

import time

from megatron_prism.core import messages


def test_silence_alone_is_broken_by_the_innermost_text(monkeypatch):
    monkeypatch.setattr(messages, "EVERY_S", 0.05)
    lines = []
    with messages.progress(lambda: "outside", lines.append):
        with messages.progress(lambda: "inside", lines.append):
            _until(lambda: len(lines) == 2)
        with messages.progress(lambda: "", lines.append):
            time.sleep(0.15)
        _until(lambda: len(lines) == 3)
        for _ in range(20):
            messages.printed()
            time.sleep(0.01)
    assert lines == ["prism: … inside, 0 s"] * 2 + ["prism: … outside, 0 s"]


def _until(reached):
    start = time.monotonic()
    while not reached():
        assert time.monotonic() < start + 5
        time.sleep(0.005)
