"""The web application: the table of routes, wired to what they need.

`Services` is everything a route may touch; a route finds it in `request.app.state.services`. There are no globals:
two applications can live in one process. Background tasks belong to the caller's `lifespan`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from tinsmith import routes
from tinsmith.bases import Bases
from tinsmith.checkpoints import Checkpoints
from tinsmith.futures import Futures
from tinsmith.models import Models
from tinsmith.notify import Waiters
from tinsmith.routes import problems
from tinsmith.sampling_sessions import SamplingSessions
from tinsmith.sessions import Sessions
from tinsmith.settings import Settings
from tinsmith.tenants import LocalTenants, Tenants

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
