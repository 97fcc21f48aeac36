"""Queries that several listings share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tinsmith.api.declaration import MAX_PAGE
from tinsmith.errors import RequestError
from tinsmith.wire.fields import OneOf, Query, Text

Limit = Annotated[int, Field(ge=0, le=MAX_PAGE)]
Offset = Annotated[int, Field(ge=0, le=2**31 - 1)]
Order = Annotated[str, OneOf(("asc", "desc"))]


class PageQuery(Query):
    """A page of a listing. A listing with another default limit has its own field."""

    limit: Limit = 20
    offset: Offset = 0


class ScopeQuery(Query):
    """Both scopes mean the same, since a tenant can access only its own objects."""

    access_scope: Annotated[str, OneOf(("owned", "accessible"))] = "owned"


class ProjectQuery(Query):
    project_id: Text | None = None


class RunsQuery(PageQuery, ScopeQuery, ProjectQuery):
    """A page of sessions or training runs."""


class AnthropicPageQuery(Query):
    """A page of Anthropic's listings, after one id or before another."""

    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 20
    after_id: Text | None = None
    before_id: Text | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> AnthropicPageQuery:
        if self.after_id is not None and self.before_id is not None:
            raise RequestError("after_id", "after_id and before_id are both given; send one of them")
        return self
