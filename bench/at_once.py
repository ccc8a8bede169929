"""Tasks that run concurrently in threads; their results come in the order of completion."""

from __future__ import annotations

import dataclasses
import faulthandler
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jspec

STATUS_INTERVAL = 60.0  # seconds without a finished task after which a line names those that run
PROJECT_FOLDERS = (Path(__file__).parent, Path(jspec.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Task:
    """``run()`` returns its result; ``name``: of the task in printed lines."""

    name: str
    run: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class _Running:
    name: str
    thread: int
    begin: float

    def __str__(self) -> str:
        """Its name, its seconds so far, and the line of the project that it is at."""
        seconds = time.perf_counter() - self.begin
        frames = traceback.walk_stack(sys._current_frames().get(self.thread))
        for frame, line in frames:
            path = Path(frame.f_code.co_filename)
            if any(path.is_relative_to(folder) for folder in PROJECT_FOLDERS):
                return f"{self.name} ({seconds:.0f} s, at {path.parent.name}/{path.name}:{line})"
        return f"{self.name} ({seconds:.0f} s)"


def as_completed(label: str, tasks: Sequence[Task], workers: int) -> Iterator[Any]:
    """Yield the results of ``tasks`` as they complete; ``workers`` of them run concurrently.

    The calling thread only waits, so that Ctrl-C reaches it whatever a task does: running tasks are
    then named and abandoned, the others do not start. An error of a task is raised immediately.
    """
    running: dict[int, _Running] = {}  # by thread
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def run(task: Task) -> Any:
        thread = threading.get_ident()
        running[thread] = _Running(task.name, thread, time.perf_counter())
        try:
            return task.run()
        finally:
            del running[thread]

    def tell(count: int) -> None:
        words = "; ".join(map(str, list(running.values())))
        print(f"{label}: {count} of {len(tasks)}, at work: {words}", file=sys.stderr, flush=True)

    count, pool = 0, ThreadPoolExecutor(workers)
    try:
        for task in tasks:
            pool.submit(run, task).add_done_callback(ended.put)
        while count < len(tasks):
            # If native code of a task blocks the interpreter, faulthandler still prints.
            faulthandler.dump_traceback_later(
                3 * STATUS_INTERVAL, file=sys.__stderr__ or sys.stderr
            )
            try:
                future = ended.get(timeout=STATUS_INTERVAL)
            except queue.Empty:
                tell(count)
                continue
            result, count = future.result(), count + 1
            yield result
    finally:
        faulthandler.cancel_dump_traceback_later()
        pool.shutdown(wait=False, cancel_futures=True)
        if running:
            tell(count)
