"""What a supervisor reports: warnings for cells, figures of use. Values come from hostile code."""

from typing import Any

import pytest

from gateway.kernels.reports import Usage, warning
from gateway.settings import MIB


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"event": "memory_high", "used": 820 * MIB, "limit": 1000 * MIB}, "memory_80"),
        ({"event": "memory_high", "used": 949 * MIB, "limit": 1000 * MIB}, "memory_95"),
        ({"event": "out_of_memory_kill", "kills": 2}, "child_out_of_memory"),
        ({"event": "process_limit", "refused": 3}, "process_limit"),
    ],
)
def test_events_that_warn(event: dict[str, Any], code: str) -> None:
    payload = warning(event)
    assert payload is not None
    assert payload.type == "warning"
    assert payload.members["code"] == code


def test_a_warning_about_memory_names_the_largest_variables() -> None:
    largest = [{"name": "df", "type": "DataFrame", "size": 500 * MIB}]
    payload = warning({"event": "memory_high", "used": 820 * MIB, "limit": 1000 * MIB}, largest)
    assert payload is not None
    assert "df (500 MiB)" in payload.members["message"]
    assert payload.members["largest_variables"] == largest


@pytest.mark.parametrize("event", [{}, {"event": "kernel_exit"}, {"event": None}, {"event": ["memory_high"]}])
def test_other_events_do_not(event: dict[str, Any]) -> None:
    assert warning(event) is None


def test_nonsense_values_break_nothing() -> None:
    payload = warning({"event": "memory_high", "used": "lots", "limit": None})
    assert payload is not None
    assert payload.members["used"] == 0


def test_usage_is_what_came_since_the_report_before() -> None:
    usage = Usage()
    assert usage.take({"cpu_seconds": 1.5, "memory_used": 10, "memory_peak": 20}) == {"cpu_seconds": 1.5, "memory_peak": 20}
    assert usage.take({"cpu_seconds": 2.0, "memory_used": 5, "memory_peak": 7}) == {"cpu_seconds": 0.5, "memory_peak": 7}
    assert usage.document(100, 2) == {
        "cpu_seconds": 2.0,
        "memory_used": 5,
        "memory_peak": 20,
        "output_bytes": 100,
        "executions": 2,
    }


@pytest.mark.parametrize("cpu", [None, "x", -1, 0.5])
def test_time_that_runs_backwards_is_not_believed(cpu: object) -> None:
    usage = Usage()
    usage.take({"cpu_seconds": 1.0})
    assert usage.take({"cpu_seconds": cpu})["cpu_seconds"] == 0
