"""What a checkpoint takes that may not be written: made up to its state dict, or unknown."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from megatron_prism.emulate.patches import checkpoints


@pytest.mark.parametrize("error", [None, KeyError("fp8_checkpoint")])
def test_a_checkpoint_ends_with_its_state_dict(error, capsys, monkeypatch):
    job, planned = SimpleNamespace(), []
    monkeypatch.setattr(checkpoints, "megatron_args", lambda: job)
    monkeypatch.setattr(
        checkpoints.planned_writes, "planned_write", lambda *given: planned.append(given) or "bytes"
    )
    log, source = [], SimpleNamespace(parts={})

    @contextlib.contextmanager
    def part(name):
        try:
            yield
        finally:
            source.parts[name] = 5

    def generate():
        log.append("state")
        if error is not None:
            raise error
        return {"model": 1}

    module = SimpleNamespace(generate_state_dict=generate, print_rank_0=print)

    def save():
        module.generate_state_dict()
        log.append("written")

    monitor = SimpleNamespace(part=part, peak_source=source)
    checkpoints.weigh(module, monitor, save)
    assert log == ["state"]
    assert (module.generate_state_dict, module.print_rank_0) == (generate, print)
    said = capsys.readouterr().err
    if error is None:
        assert source.parts == {"checkpoint": 5}
        assert planned == [({"model": 1}, job)]
        assert monitor.saved_bytes == "bytes"
        assert not said
    else:
        assert source.parts == {}
        assert "takes is unknown: KeyError: 'fp8_checkpoint'" in said
