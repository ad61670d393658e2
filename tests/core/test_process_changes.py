"""Changes are taken back in reverse order, and nothing is left behind."""

import pytest

from megatron_prism.core.process_changes import ProcessChanges


class Base:
    def inherited(self):
        return "base"

    @staticmethod
    def static():
        return "static"


class Child(Base):
    own = 1


def test_attributes_come_back_as_they_were():
    changes = ProcessChanges()
    raw, before = vars(Base)["static"], dict(vars(Child))
    changes.set(Child, "own", 2)
    changes.set(Child, "own", 3)
    changes.set(Child, "inherited", lambda self: "other")
    changes.set(Child, "new", 4)
    changes.set(Base, "static", staticmethod(lambda: "other"))
    assert (Child.own, Child().inherited(), Child.new, Base.static()) == (3, "other", 4, "other")
    assert len(changes) == 5
    changes.undo()
    assert dict(vars(Child)) == before
    assert vars(Base)["static"] is raw
    assert len(changes) == 0


def test_one_failure_leaves_nothing_else_behind():
    changes, seen = ProcessChanges(), []
    changes.on_undo(lambda: seen.append("first"))
    changes.on_undo(lambda: 1 / 0)
    changes.on_undo(lambda: seen.append("last"))
    with pytest.raises(ZeroDivisionError):
        changes.undo()
    assert seen == ["last", "first"]
