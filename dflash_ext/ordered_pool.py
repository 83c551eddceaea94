"""Work on many items at once, results in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 4  # items a worker may be ahead of the first one that is not done


class OrderedPool(Generic[Item, Result]):
    """Threads that apply a function; `stop` is set as soon as nobody wants results any more.

    The threads are daemons: one that hangs in a request does not keep the process alive. Functions
    that wait should wait for `stop`.
    """

    def __init__(self, function: Callable[[Item], Result], workers: int) -> None:
        self.stop = threading.Event()
        self._function = function
        self._workers = workers
        self._tasks: SimpleQueue[tuple[int, Item] | None] = SimpleQueue()
        self._done: dict[int, Result | BaseException] = {}
        self._changed = threading.Condition()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """function(item) of each item, in order; raises the first item's exception that has one."""
        numbered = enumerate(items)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._workers)]
        for thread in threads:
            thread.start()
        try:
            asked = self._ask(numbered, _AHEAD * self._workers)
            for index in itertools.count():
                if index == asked:
                    return
                result = self._result(index)
                if isinstance(result, BaseException):
                    raise result
                yield result
                asked += self._ask(numbered, 1)
        finally:
            self.stop.set()
            for _ in threads:
                self._tasks.put(None)

    def _ask(self, numbered: Iterator[tuple[int, Item]], count: int) -> int:
        tasks = list(itertools.islice(numbered, count))
        for task in tasks:
            self._tasks.put(task)
        return len(tasks)

    def _result(self, index: int) -> Result | BaseException:
        with self._changed:
            self._changed.wait_for(lambda: index in self._done)
            return self._done.pop(index)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self.stop.is_set():
            index, item = task
            try:
                result: Result | BaseException = self._function(item)
            except BaseException as error:
                result = error
            with self._changed:
                self._done[index] = result
                self._changed.notify_all()
