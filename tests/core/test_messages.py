"""Lines that say what is being done where nothing else is printed."""

import time

from megatron_prism.core import messages


def test_silence_alone_is_broken_by_the_innermost_text(monkeypatch):
    monkeypatch.setattr(messages, "EVERY_S", 0.05)
    monkeypatch.setattr(messages, "_grows", lambda: True)
    said = []
    with messages.progress(lambda: "outside", said.append):
        with messages.progress(lambda: "inside", said.append):
            _until(lambda: len(said) == 2)
        with messages.progress(lambda: "", said.append):
            time.sleep(0.15)
        _until(lambda: len(said) == 4)
        for _ in range(20):
            messages.printed()
            time.sleep(0.01)
    assert said == ["prism: … inside, 0 s", ".", "\n", "prism: … outside, 0 s", "\n"]


def test_a_line_grows_until_more_than_numbers_changes(monkeypatch):
    monkeypatch.setattr(messages, "EVERY_S", 0.02)
    monkeypatch.setattr(messages, "_grows", lambda: True)
    said, texts = [], ["step 1 of 9", "step 2 of 9", "writing 3"]
    with messages.progress(lambda: texts.pop(0) if len(texts) > 1 else texts[0], said.append):
        _until(lambda: len(said) == 5)
        monkeypatch.setattr(messages, "LINE_S", 0)
        _until(lambda: len(said) >= 7)
    assert said[:5] == ["prism: … step 1 of 9, 0 s", ".", "\n", "prism: … writing 3, 0 s", "."]
    assert said[-3:] == ["\n", "prism: … writing 3, 0 s", "\n"]


def test_off_a_terminal_a_line_comes_now_and_then(monkeypatch):
    monkeypatch.setattr(messages, "EVERY_S", 0.02)
    monkeypatch.setattr(messages, "LINE_OFF_TERMINAL_S", 0.3)
    monkeypatch.setattr(messages, "_grows", lambda: False)
    said = []
    with messages.progress(lambda: "step 1", said.append):
        start = time.monotonic()
        _until(lambda: len(said) == 1)
        time.sleep(0.1)
        assert len(said) == 1 or time.monotonic() > start + 0.3
        _until(lambda: len(said) == 2)
        assert time.monotonic() > start + 0.3
    assert said == ["prism: … step 1, 0 s\n"] * 2


def _until(reached):
    start = time.monotonic()
    while not reached():
        assert time.monotonic() < start + 5
        time.sleep(0.005)
