"""Tasks that run at once: what ends first comes first, and a wait says what it waits for."""

import threading

import pytest

from bench import at_once
from bench.at_once import Task, as_completed


def raises():
    raise ValueError("wrong")


def test_what_ends_first_comes_first():
    last = threading.Event()
    tasks = [Task("slow", lambda: last.wait(60)), Task("quick", lambda: 1), Task("next", lambda: 2)]
    result = as_completed("some", tasks, 2)
    assert [next(result), next(result)] == [1, 2]
    last.set()
    assert list(result) == [True]


def test_as_many_run_at_once_as_there_are_workers():
    meeting = threading.Barrier(3, timeout=60)
    tasks = [Task(str(i), meeting.wait) for i in range(3)]
    assert sorted(as_completed("some", tasks, 3)) == [0, 1, 2]


def test_a_wait_says_what_runs_and_where(monkeypatch, capsys):
    monkeypatch.setattr(at_once, "STATUS_INTERVAL", 0.05)
    last = threading.Event()
    result = as_completed(
        "some", [Task("quick", lambda: 1), Task("slow", lambda: last.wait(0.5))], 1
    )
    assert list(result) == [1, False]
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("some: 1 of 2, at work: slow (0 s, at bench/at_once.py:")


def test_an_error_is_raised_at_once_and_nothing_else_begins(capsys):
    last, begun = threading.Event(), []
    tasks = [Task("slow", lambda: last.wait(60)), Task("wrong", raises)]
    tasks += [Task("late", lambda: begun.append(last.wait(60)))] * 4
    with pytest.raises(ValueError, match="wrong"):
        list(as_completed("some", tasks, 2))
    assert "some: 0 of 6, at work: slow (0 s" in capsys.readouterr().err
    last.set()
    assert len(begun) <= 1  # what the thread of the error had taken up by then
