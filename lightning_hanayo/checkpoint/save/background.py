"""A thread that does one task after another, until one fails."""

from collections.abc import Callable
from queue import Queue
from threading import Thread


class Background:
    """Starts a daemon thread with the first task: it never keeps the process alive. `end` waits for it.

    Example:
        >>> tasks = Background()
        >>> tasks.add(write)
        >>> tasks.add(remove_old)  # once `write` has returned, and never if it raises
        >>> tasks.end()
    """

    error: BaseException | None = None
    """of the task that failed; those after it are left out"""

    def __init__(self) -> None:
        self._tasks: Queue[Callable[[], None] | None] = Queue()
        self._thread: Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all tasks are done, or left out."""
        return not self._tasks.unfinished_tasks

    def add(self, task: Callable[[], None]) -> None:
        """Do the task after those before it."""
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True, name="hanayo-checkpoint")
            self._thread.start()
        self._tasks.put(task)

    def wait(self) -> None:
        """Wait until all tasks are done, or left out."""
        self._tasks.join()

    def end(self, within: float | None = None) -> bool:
        """End the thread after the last task; whether that happened `within` so many seconds (None: wait for it)."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(within)
            if self._thread.is_alive():
                return False
        self._thread = None
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self.error is None:
                    task()
            except BaseException as error:
                self.error = error
            finally:
                del task  # it holds a snapshot
                self._tasks.task_done()
        self._tasks.task_done()
