"""Quantities: what is printed reads back, prints the same again, and is as exact as it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prism.core import units
from megatron_prism.core.errors import UnitError

PAIRS = {
    "ns": (units.parse_ns, units.format_ns),
    "bytes": (units.parse_bytes, units.format_bytes),
}
WHOLE = st.integers(-(10**18), 10**18)


@pytest.mark.parametrize("kind", PAIRS)
@given(value=WHOLE)
def test_printed_text_reads_back_to_the_same_text(kind, value):
    parse, show = PAIRS[kind]
    assert show(parse(show(value))) == show(value)


@pytest.mark.parametrize("kind", PAIRS)
@given(value=WHOLE)
def test_printing_loses_at_most_half_of_the_fourth_digit(kind, value):
    parse, show = PAIRS[kind]
    # 0.5 / 1000 relative, and never more than a half below the smallest unit
    assert abs(parse(show(value)) - value) * 2000 <= abs(value) + 1000


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_ns, "412us", 412_000),
        (units.parse_ns, "1µs", 1_000),
        (units.parse_ns, 1500, 1_500),
        (units.parse_ns, "10min", 600 * 10**9),
        (units.parse_limit, "1048576", 1 << 20),
        (units.parse_limit, "80KiB", 80 << 10),
        (units.parse_bytes, "1KB", 1000),
        (units.parse_bytes, "1.5 GiB", 3 * 2**29),
        (units.parse_bytes, "-16 MiB", -(16 * 2**20)),
        (units.parse_count, "70.6B", 70_600_000_000),
        (units.parse_count, "1,048,576", 1_048_576),
        (units.parse_count, "1e3", 1000),
    ],
)
def test_reads(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.format_ns, 999_999, "1 ms"),
        (units.format_ns, 90 * 10**9, "90 s"),
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 2**20 - 1, "1 MiB"),
        (units.format_bytes, 5000 * 2**50, "5000 PiB"),
    ],
)
def test_prints(show, value, text):
    assert show(value) == text


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (units.parse_ns, "fast", "'fast' is no duration"),
        (units.parse_ns, "3 GiB", "'GiB' is no unit of a duration"),
        (units.parse_ns, "1.5", "no whole number"),
        (units.parse_bytes, "16gib", "did you mean GiB?"),
        (units.parse_limit, "80", "80 is 80 bytes, which no device has"),
        (units.parse_bytes, None, "None is no size"),
        (units.parse_count, "8x", "fix: use K, M, B, T"),
    ],
)
def test_refuses_with_a_fix(parse, text, says):
    with pytest.raises(UnitError) as error:
        parse(text)
    assert says in str(error.value)
    assert "fix:" in str(error.value)
    assert isinstance(error.value, ValueError)


def test_percents_have_no_exponent():
    said = [units.format_percent(part) for part in (0, 0.0238, 0.305, 0.996, 1.043, 12.5, -0.05)]
    assert said == ["0 %", "2.4 %", "30 %", "100 %", "104 %", "1250 %", "-5 %"]


def test_no_change_has_no_minus():
    said = [units.format_change(x) for x in (0.0746, -0.00001, -0.5)]
    assert said == ["+7.5 %", "+0.0 %", "-50.0 %"]
