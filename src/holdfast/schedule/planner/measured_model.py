"""A measured model as the linear program takes it."""

from __future__ import annotations

from dataclasses import dataclass

from ..work import Work


@dataclass(frozen=True)
class MeasuredModel:
    """Equal blocks, each the mean of the blocks that were measured."""

    work: Work
    description: str = "the model at hand"
    tokens: int = 1
    micro_batch: int = 1
    sequence: int = 1
    """Tokens, micro-batch and sequence are not known; no choice depends on them."""

    @property
    def blocks(self) -> int:
        return len(self.work.blocks)

    @property
    def trained_block_parameters(self) -> int:
        return round(self._mean("elements"))

    @property
    def block_parameters(self) -> int:
        return round(self._mean("param_bytes") / self.param_bytes_each)

    @property
    def resident_parameters(self) -> int:
        return self.work.resident_elements

    @property
    def input_elements(self) -> int:
        return self.work.input_bytes // self.param_bytes_each

    @property
    def forward_flop(self) -> float:
        return self._mean("forward_flop")

    @property
    def backward_flop(self) -> float:
        return self._mean("backward_work")

    @property
    def head_flop(self) -> float:
        return self.work.head_flop

    @property
    def workspace_bytes(self) -> int:
        return self.work.workspace_bytes

    @property
    def param_bytes_each(self) -> int:
        """Bytes of one parameter on the device."""
        trained = self._mean("elements")
        return max(round(self._mean("trained_param_bytes") / trained), 1) if trained else 2

    @property
    def state_bytes_each(self) -> float:
        """Bytes of one trained parameter's master and optimizer state."""
        trained = self._mean("elements")
        return self._mean("state_bytes") / trained if trained else 0.0

    def _mean(self, what: str) -> float:
        return sum(getattr(block, what) for block in self.work.blocks) / len(self.work.blocks)
