"""The weights that a request of OpenAI's or Anthropic's clients names by its `model`.

A base model and a checkpoint never change. `tinker://RUN` means the newest weights that a training run has published:
its last ephemeral publish while that session is open, or its last checkpoint for sampling, whichever is newer. So an
agent keeps one name while a trainer publishes; each answer names the weights that gave it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.api.services import Services
from tinsmith.chat.generation_request import ModelTarget
from tinsmith.errors import NotFoundError, RequestError
from tinsmith.store.checkpoints import parse_sampler_path
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.store.server_sessions import SampleId
from tinsmith.types import ModelShape


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """A base model, with the path of a checkpoint or the sampling session of an ephemeral publish."""

    shape: ModelShape
    model_path: str | None = None
    published: SamplingSession | None = None

    @property
    def version_id(self) -> str | None:
        return self.model_path if self.published is None else self.published.version_id

    @property
    def is_inflight(self) -> bool:
        return self.published is not None and self.published.is_inflight

    def next_sample(self, services: Services, tenant_id: str) -> SampleId:
        """The id of a new sample of these weights."""
        if self.published is not None:
            return services.implicit_sessions.next_sample_of(self.published)
        return services.implicit_sessions.next_sample(tenant_id, self.shape.name, self.model_path)


class ModelNotFoundError(RequestError, NotFoundError):
    """The model does not exist."""


def resolve_model_name(services: Services, model: str | None) -> str:
    """Return the model that a request names, or the server's only base model."""
    names = [shape.name for shape in services.bases]
    if model is None and len(names) != 1:
        raise RequestError("model", f"model is missing; this server serves {', '.join(names)}")
    return names[0] if model is None else model


def find_weights(services: Services, tenant_id: str, target: ModelTarget) -> ServedWeights:
    """Find the weights of a target. Raises ModelNotFoundError if the tenant may not read them or they do not exist."""
    try:
        if target.training_run_id is not None:
            return _find_newest(services, tenant_id, target, target.training_run_id)
        if target.model_path is not None:
            checkpoint = services.checkpoints.get(tenant_id, parse_sampler_path(target.model_path, "model"))
            return ServedWeights(_find_base(services, target, checkpoint.base_model), checkpoint.ref.path)
        return ServedWeights(services.bases.get(target.base_model or ""))
    except NotFoundError as error:
        raise ModelNotFoundError("model", str(error), "model_not_found") from error


def _find_newest(services: Services, tenant_id: str, target: ModelTarget, training_run_id: str) -> ServedWeights:
    published = services.sampling_sessions.newest_of_model(tenant_id, training_run_id)
    saved = services.checkpoints.newest_for_sampling(tenant_id, training_run_id)
    if saved is not None and (published is None or saved.created_at > published.created_at):
        return ServedWeights(_find_base(services, target, saved.base_model), saved.ref.path)
    if published is None:
        raise NotFoundError(
            f"training run {training_run_id!r} has no published weights; call save_weights_for_sampler or "
            "save_weights_and_get_sampling_client first, with the same key"
        )
    return ServedWeights(_find_base(services, target, published.base_model), published=published)


def _find_base(services: Services, target: ModelTarget, base_model: str) -> ModelShape:
    """The base model of weights, which the target may name, too."""
    if target.base_model not in (None, base_model):
        raise RequestError(
            "model", f"model names {target.base_model!r}, but its weights were trained on {base_model!r}"
        )
    return services.bases.get(base_model)
