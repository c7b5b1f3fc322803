"""One process, whatever the environment says: there are several devices, but nobody to talk to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ParallelStrategy as Base
else:
    Base = object


class OneProcess(Base):
    """The part of a strategy that other strategies use to talk to other processes."""

    @property
    def world_size(self) -> int:
        """One process."""
        return 1

    @property
    def global_rank(self) -> int:
        """The only process."""
        return 0

    @property
    def local_rank(self) -> int:
        """The only process."""
        return 0

    @property
    def node_rank(self) -> int:
        """The only node."""
        return 0

    @property
    def is_global_zero(self) -> bool:
        """The only process."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every batch is for this process."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def num_nodes(self) -> int:
        """One machine."""
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count != 1:
            raise ValueError(
                f"Trainer(num_nodes={count}): strategy 'self_balance' spreads a model over the devices of one machine, "
                f"in one process. Use num_nodes=1."
            )

    @property
    def cluster_environment(self) -> Any:
        """The environment, of one process."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        processes = 1 if environment is None else environment.world_size()
        if processes > 1:
            raise ValueError(
                f"{type(environment).__name__} has started {processes} processes, but strategy 'self_balance' runs all "
                f"devices from one: each process would train the whole model and write the same checkpoints. Start the "
                f"script once: plain `python` instead of torchrun, `--ntasks-per-node=1` under SLURM."
            )
        self._cluster_environment = environment

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """There is nothing to reduce over."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """There is nobody else to ask."""
        return decision

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """There is nothing to gather."""
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """There is nobody to tell."""
        return obj

    def barrier(self, name: str | None = None) -> None:
        """There is nobody to wait for."""
