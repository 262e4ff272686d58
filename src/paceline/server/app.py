"""The application: endpoints, error bodies, and the layers around them.

Owns the assembly. Knows neither sockets nor processes: an engine that has started is handed in.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline.server.api import chat, completions, health, models, tokenize
from paceline.server.config import ServerConfig
from paceline.server.errors import install_error_handlers
from paceline.server.messages import ServingEngine
from paceline.server.openapi import install_openapi
from paceline.server.page import page_router
from paceline.server.security import Guard
from paceline.server.serving import Serving
from paceline.server.tracing import TraceMiddleware


def create_app(client: ServingEngine, config: ServerConfig | None = None) -> FastAPI:
    """The application over an engine.

    Args:
        client: started.
    """
    config = config or ServerConfig()
    app = FastAPI(docs_url=None, redoc_url=None)
    app.state.serving = Serving(client, config)
    for api in (chat, completions, tokenize, models, health):
        app.include_router(api.router)
    app.include_router(page_router())
    install_openapi(app)
    install_error_handlers(app)
    app.add_middleware(Guard, config.api_keys, config.max_body_bytes)
    app.add_middleware(TraceMiddleware)
    if config.allowed_origins:
        # Outermost, so that a browser may read refusals too and asks without a key whether it may.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app
