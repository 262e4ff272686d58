"""docs/api.md is what signatures and docstrings say."""

from __future__ import annotations

from pathlib import Path

import paceline
from paceline.cli.api_reference import CHAPTERS, api_reference, markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
DOCSTRING = """Count things.

    With :class:`~paceline.api.llm.LLM`, and
    ``two`` lines.

    Args:
        first: what comes
            first.
        second, third: the others.

    >>> 1 + 1
    2
    """
SHOWN = """Count things.

With `LLM`, and `two` lines.

**Args**

- `first`: what comes first.
- `second, third`: the others.

```python
>>> 1 + 1
2
```
"""


def test_the_page_is_what_the_sources_say() -> None:
    command = "python -m paceline.cli.api_reference > docs/api.md"
    assert PAGE.read_text(encoding="utf-8") == api_reference(), f"outdated; run {command}"


def test_a_docstring_becomes_markdown() -> None:
    assert markdown(DOCSTRING) == SHOWN


def test_every_public_class_has_its_section() -> None:
    shown = {kind.__name__ for classes in CHAPTERS.values() for kind in classes}
    assert shown | {"PacelineError", "__version__"} >= set(paceline.__all__)


def test_public_names_are_completed_before_they_are_imported() -> None:
    assert set(paceline.__all__) <= set(dir(paceline))
