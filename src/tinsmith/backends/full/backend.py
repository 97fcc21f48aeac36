"""`FullBackend`: the Backend protocol where a model is a copy of all weights of its base, and all of them are trained.

A model takes 16 bytes per weight (weights, gradient, two moments), a thousand times as much as an adapter, so this
backend is meant for one run at a time. Other runs wait on disk while one needs the memory, as cold adapters do. A
version is a complete model, so sampling serves one version at a time. Training and sampling are in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tinsmith.backends.full import base
from tinsmith.backends.full.base import FullBase, FullSampler, FullTrainer, FullWeights
from tinsmith.backends.torch import TorchBackend, checkpoint
from tinsmith.backends.torch.adapters import Adapter, TrainedModel
from tinsmith.backends.torch.optim import check_optimizer_type
from tinsmith.errors import SettingsError, UserError
from tinsmith.types import OPTIMIZERS, LoraSpec, ModelShape


class FullBackend(TorchBackend):
    _base: FullBase

    def __init__(
        self,
        shape: ModelShape,
        *,
        device: str = "auto",
        dtype: str = "auto",
        deterministic: str = "off",
        quantize: str = "off",
        **options: str,
    ) -> None:
        """Raises SettingsError on options that only suit adapters over a frozen base."""
        if dtype not in ("auto", "float32"):
            raise SettingsError(f"dtype is {dtype!r}; backend 'full' trains in float32 only")
        for name, value in (("deterministic", deterministic), ("quantize", quantize)):
            if value != "off":
                raise SettingsError(f"{name} is {value!r}; backend 'full' only supports 'off'")
        super().__init__(shape, device=device, dtype="float32", **options)

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> FullBase:
        return cast(FullBase, FullBase.load(shape, device=device, dtype=dtype, recompute=recompute, quantize=quantize))

    def _make_trainer(self, max_tokens: int, chunk_rows: int) -> FullTrainer:
        return FullTrainer(self._base, max_tokens, chunk_rows)

    def _make_sampler(self) -> FullSampler:
        return FullSampler(self._base, self._versions, self._sampler_options())

    def _adapters_to_move(self) -> list[Adapter]:
        return [*super()._adapters_to_move(), self._base.original]

    def _after_move(self) -> None:
        self._base.rebind()

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str = "adamw") -> None:
        self._check(spec, optimizer_type)
        weights = FullWeights(self._base.layout, self._base.original.flat_P.to(self._home, copy=True))
        self._models[model_id] = TrainedModel(weights, optimizer_type=optimizer_type)

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        self._check(spec, optimizer_type)
        weights = base.load_weights(self._base.layout, directory, self._home)
        trained = TrainedModel(weights, optimizer_type=optimizer_type)
        if optimizer:
            checkpoint.load_optimizer(trained, directory, base.flatten_tensors)
            checkpoint.load_gradient(trained, directory, base.flatten_tensors)
        self._models[model_id] = trained

    def load_version(self, version_id: str, directory: Path) -> None:
        self._versions[version_id] = base.load_weights(self._base.layout, directory, self._home)

    def _write(
        self, trained: TrainedModel, optimizer: bool, directory: Path, *, stacked: bool, exported: bool = False
    ) -> None:
        self._save_adapter(cast(FullWeights, trained.adapter), directory, stacked=stacked)
        if optimizer:
            checkpoint.save_optimizer(trained, directory, base.name_tensors)
        checkpoint.save_gradient(trained, directory, base.name_tensors)

    def _save_adapter(self, adapter: FullWeights, directory: Path, *, stacked: bool) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`stacked`: for this server only, without the files that other software needs."""
        base.save_weights(adapter, directory)
        if not stacked:
            base.save_config_and_tokenizer(self._base, directory)

    @staticmethod
    def _check(spec: LoraSpec, optimizer_type: str) -> None:
        if spec.rank:
            raise UserError(
                f"this is an adapter of rank {spec.rank}, and this server trains all weights (backend 'full'); "
                "load it where adapters are trained"
            )
        if OPTIMIZERS[check_optimizer_type(optimizer_type)].for_lora_only:
            raise UserError(f"optimizer_config.type is {optimizer_type!r}; all weights are trained by 'adamw' only")
