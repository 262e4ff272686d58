"""The application: endpoints, error bodies, and the layers around them.

Owns the assembly. Knows neither sockets nor processes: engines are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from paceline.server import anthropic, ollama, responses
from paceline.server.admin import adapters, health, speedup
from paceline.server.engine_process.client import EngineClient
from paceline.server.hosting.models import Models, Offer
from paceline.server.http.config import ServerConfig
from paceline.server.http.errors import install_error_handlers
from paceline.server.http.openapi import install_openapi
from paceline.server.http.security import BROWSERS_MAY_READ, BROWSERS_MAY_SEND, Guard
from paceline.server.http.tracing import TraceMiddleware
from paceline.server.llama_cpp import completion, model
from paceline.server.openai import chat, completions, embeddings, models
from paceline.server.page import page_router


def create_app(
    client: EngineClient, config: ServerConfig | None = None, others: Sequence[Offer] = ()
) -> FastAPI:
    """The application over an engine, and over others that it starts when they are asked for.

    Raises: as :class:`~paceline.server.hosting.models.Models`.
    """
    config = config or ServerConfig()
    apis = (chat, completions, embeddings, models, completion, model, adapters, health, speedup)
    routers = [*(api.router for api in apis), anthropic.router, responses.router]
    routers += [*ollama.routers, page_router()]
    routes = [route for router in routers for route in router.routes]
    # As they are: ``include_router`` would make each of them anew, in every application.
    app = FastAPI(docs_url=None, redoc_url=None, routes=routes)
    app.state.models = Models(client, config, others)
    app.state.responses = responses.ResponseStore()
    install_openapi(app)
    install_error_handlers(app, [route for route in routes if isinstance(route, Route)])
    app.add_middleware(Guard, config)
    app.add_middleware(TraceMiddleware)
    if config.allowed_origins:
        # Outermost, so that a browser may read refusals too and asks without a key whether it may.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=BROWSERS_MAY_SEND,
            expose_headers=BROWSERS_MAY_READ,
        )
    return app
