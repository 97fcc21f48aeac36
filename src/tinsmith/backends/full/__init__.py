"""Full fine-tuning: every weight of the base model is trained, by one run at a time."""

from tinsmith.backends.full.backend import FullBackend

__all__ = ["FullBackend"]
