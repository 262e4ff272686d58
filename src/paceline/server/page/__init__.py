"""The page at ``/``: static files, their headers, their compression. Knows no engine and no key.

The files hold no data of the server: whatever the page shows, it asks the API for. They are read
once, and sent without what only readers of the source need; a client that has one is answered 304
by its entity tag.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, HTTPException, Request, Response

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Model output is untrusted: no script but our files, and no markup made from strings.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
# Comments on lines of their own, blank lines, indentation.
MARGINALIA = re.compile(rb"^\s*(?:/\*.*?\*/|//[^\n]*)\n|^\s+", re.MULTILINE | re.DOTALL)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Kept by the browser alone, and asked for again with the tag each time: a page and scripts of
    # two versions never meet.
    "Cache-Control": "private, no-cache",
    "Vary": "Accept-Encoding",
}


class Asset:
    """One static file, as it is and compressed."""

    def __init__(self, media_type: str, content: bytes) -> None:
        self.media_type = media_type
        self.content = content
        self.packed = gzip.compress(content, mtime=0)
        self.tag = f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'

    def answer(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.tag}
        if self.tag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(self.packed, headers=headers, media_type=self.media_type)
        return Response(self.content, headers=headers, media_type=self.media_type)


@cache
def read_assets() -> Mapping[str, Asset]:
    """The files of the page by name, those of others as ``vendor/NAME`` and as they are."""
    folder = files(__package__)
    own = {file.name: MARGINALIA.sub(b"", file.read_bytes()) for file in _typed(folder)}
    others = {f"vendor/{file.name}": file.read_bytes() for file in _typed(folder / "vendor")}
    return {name: Asset(MEDIA_TYPES[_kind(name)], text) for name, text in (own | others).items()}


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _typed(folder: Traversable) -> list[Traversable]:
    """Files of a folder that a browser is given."""
    return [file for file in folder.iterdir() if _kind(file.name) in MEDIA_TYPES]


def page_router() -> APIRouter:
    """Routes of the page: ``/`` and ``/page/NAME``; absent from the OpenAPI document."""
    assets = read_assets()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return assets["index.html"].answer(request)

    @router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise HTTPException(404, f"no file {name!r} in the page")
        return assets[name].answer(request)

    return router
