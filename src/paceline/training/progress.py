"""What a person sees while a model trains: a bar on a terminal, lines elsewhere. Owns no state of
the training."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_SECONDS = 30.0


class ProgressDisplay:
    """Context manager; :meth:`update` is cheap enough for every step."""

    def __init__(self, enabled: bool, title: str) -> None:
        self._console = Console(stderr=True, soft_wrap=True)
        self._enabled = enabled
        self._title = title
        self._bar: Progress | None = None
        self._last_line = 0.0

    def __enter__(self) -> ProgressDisplay:
        if self._enabled and self._console.is_terminal:
            columns = (TextColumn(self._title), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._enabled:
            self._console.print(f"{self._title}: {text}", highlight=False, markup=False)

    def update(
        self, done: float, step: int, loss: float, speed: float, seconds_left: float
    ) -> None:
        """``done`` is the share of the run, ``speed`` in tokens per second."""
        left = f"{seconds_left / 60:.0f} min" if seconds_left > 90 else f"{seconds_left:.0f} s"
        text = f"step {step}  loss {loss:.3f}  {speed:,.0f} tok/s  {left} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, 1.0), description=text)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self.note(f"{done:5.1%}  {text}")
