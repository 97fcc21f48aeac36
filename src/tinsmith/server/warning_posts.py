"""Posts the dashboard's warnings to the operator's address, `TINSMITH_WARNINGS_URL`, each once while it lasts.

A body is {"text", "kind", "warning", "tenant", "run", "name", "time"}. `text` is the whole sentence, as chats expect
it; tenant, run and name are null for the machine. The address is the operator's own choice, so any host is allowed, and
redirects are not followed.
The posted warnings are remembered by this process: after a restart, one that lasts is posted again. A post that fails
is tried again with the janitor's pauses, and those after it wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from tinsmith.api.dashboard.warnings import list_machine_warnings, list_tenant_warnings
from tinsmith.api.request import JsonObject
from tinsmith.api.services import Services
from tinsmith.db.database import now
from tinsmith.errors import TinsmithError
from tinsmith.wire.fields import iso

WARNINGS_S = 60.0
"""How often the warnings are read."""
TIMEOUT_S = 10.0


class PostError(TinsmithError):
    """The address of warnings did not accept one."""


def has_warnings_url(services: Services) -> bool:
    return bool(services.settings.warnings_url.get_secret_value())


class WarningPoster:
    def __init__(self, services: Services, transport: httpx.BaseTransport | None = None) -> None:
        self._services = services
        self._transport = transport
        self._posted: set[tuple[str | None, str]] = set()

    def post_new(self) -> None:
        """Post the warnings that were not there before. Raises PostError, which does not name the secret address."""
        current = {(tenant, str(warning["key"])): warning for tenant, warning in self._list_warnings()}
        self._posted &= current.keys()  # one that has ended is posted when it comes back
        new = {key: warning for key, warning in current.items() if key not in self._posted}
        if not new:
            return
        with httpx.Client(transport=self._transport, timeout=TIMEOUT_S) as client:
            for (tenant, key), warning in new.items():
                self._post(client, tenant, warning)
                self._posted.add((tenant, key))

    def _list_warnings(self) -> Iterator[tuple[str | None, JsonObject]]:
        for warning in list_machine_warnings(self._services.settings.resolved_data_dir):
            yield None, warning
        for tenant in self._services.overview.list_training_tenants():
            for warning in list_tenant_warnings(self._services, tenant):
                yield tenant, warning

    def _post(self, client: httpx.Client, tenant: str | None, warning: JsonObject) -> None:
        subject = warning["name"] or warning["run"]
        sentence = f"{warning['kind']}: {warning['text']}"
        body = {
            "text": f"{subject}: {sentence}" if subject else sentence,
            "kind": warning["kind"],
            "warning": warning["text"],
            "tenant": tenant,
            "run": warning["run"],
            "name": warning["name"],
            "time": iso(now()),
        }
        try:
            answer = client.post(self._services.settings.warnings_url.get_secret_value(), json=body)
        except httpx.HTTPError as error:
            raise PostError(f"TINSMITH_WARNINGS_URL cannot be reached: {type(error).__name__}") from None
        if not answer.is_success:
            raise PostError(f"TINSMITH_WARNINGS_URL returned status {answer.status_code}")
