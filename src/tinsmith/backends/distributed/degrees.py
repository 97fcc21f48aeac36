"""How a base model is spread over ranks: how many share the data, how many share each layer.

Rank d * tensor + t has data index d and tensor index t: ranks of one tensor group are neighbours, which talk most.
Plain values; knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Degrees:
    """`data` ranks take different sequences of a step, `tensor` ranks hold different heads and columns. `shard_base`:
    the ranks that share the data hold a part each of every layer, too.
    """

    data: int = 1
    tensor: int = 1
    shard_base: bool = False

    @classmethod
    def read(cls, data_parallel: str, tensor_parallel: str, shard_base: str) -> Degrees:
        """From options. Raises SettingsError on what cannot be."""
        data, tensor = (
            _positive(name, text)
            for name, text in (("data_parallel", data_parallel), ("tensor_parallel", tensor_parallel))
        )
        if shard_base not in ("on", "off"):
            raise SettingsError(f"backend option shard_base is {shard_base!r}; choose 'on' or 'off'")
        if shard_base == "on" and data == 1:
            raise SettingsError(
                "shard_base divides the base model among the ranks of data_parallel, and that is 1; set it to 2 or more"
            )
        return cls(data, tensor, shard_base == "on")

    @property
    def world(self) -> int:
        return self.data * self.tensor

    @property
    def parted(self) -> bool:
        """Whether a rank holds less than the whole base model, so that every forward is everyone's."""
        return self.tensor > 1 or self.shard_base

    def tensor_group(self, data_index: int) -> list[int]:
        """The ranks that compute the same rows together."""
        return [data_index * self.tensor + index for index in range(self.tensor)]

    def data_group(self, tensor_index: int) -> list[int]:
        """The ranks that hold the same heads and columns."""
        return [index * self.tensor + tensor_index for index in range(self.data)]


def _positive(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise SettingsError(f"backend option {name} is {text!r}; it must be a whole number of at least 1")
    return number
