"""What the site has beyond the pages of ``docs/``: the repository's other pages, and their links.

The pages link as files of the repository do. The README and the like become pages of the site, and
links to them, and from them, are turned accordingly.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Pages outside docs/, by their paths in the repository, and their names in the site.
ADDED = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for source, name in ADDED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    name = page.file.src_uri
    homes = {site: source for source, site in ADDED.items()}
    home = posixpath.dirname(homes.get(name, f"docs/{name}"))

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, match[2]))
        found = ADDED.get(target)
        if found is None and target.startswith("docs/"):
            found = target.removeprefix("docs/")
        if found is None:
            return match[0]  # Nothing of the site: the check of links says so.
        return match[1] + posixpath.relpath(found, posixpath.dirname(name) or ".") + match[3]

    return LINK.sub(turned, markdown)
