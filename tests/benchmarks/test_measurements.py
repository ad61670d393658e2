"""docs/measurements.md is what benchmarks/measurements.py writes."""

import json
import re

import pytest

from benchmarks import measurements


def section(name):
    return json.loads((measurements.TABLES / f"{name}.json").read_text(encoding="utf-8"))


def test_the_page_is_what_the_command_writes():
    assert measurements.PAGE.read_text(encoding="utf-8") == measurements.page()


def test_every_stored_section_is_on_the_page():
    stored = sorted(path.stem for path in measurements.TABLES.glob("*.json"))
    assert stored == sorted(measurements.SECTIONS)


@pytest.mark.parametrize("name", measurements.SECTIONS)
def test_a_table_has_one_sentence_and_names_files_that_are_there(name):
    for fields in section(name)["tables"]:
        table = measurements.Table(**fields)
        assert re.search(r"\.\s+[A-Z]", table.note) is None, table.note
        for file in filter(None, table.data.split(", ")):
            assert (measurements.RESULTS / file).exists()
        assert bool(table.rows) != bool(table.rows_by)
        for row in table.rows:
            assert len(row) == len(table.columns)


def test_the_errors_of_segments_follow_from_the_stored_times():
    """pp4's forward on an H100: 10.3102 ms by the table, 10.4451 ms measured."""
    first = measurements.segments("h100_segments.json").splitlines()[2]
    assert first == "| pp4 | 1 | forward | 10.4 ms | −1.3 % |"
