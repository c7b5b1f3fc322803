"""`SelfBalance`: the mixin by which a LightningModule says what may be placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import nn

    Entry: TypeAlias = nn.Module | str | list[nn.Module | str] | tuple[nn.Module | str, ...]


class SelfBalance:
    """Mixin of a LightningModule whose blocks may be placed on several devices.

    Example:
        class Net(SelfBalance, LightningModule):
            def self_balance(self):
                return [self.embed, *self.layers, self.head]

        Trainer(strategy="self_balance", devices=4).fit(Net(), loader)

    Subclassing it registers the strategy with the package whose LightningModule is used, `pytorch_lightning` or
    `lightning.pytorch`. Overriding its methods is optional.
    """

    def self_balance(self) -> Sequence[Entry] | None:
        """The blocks: modules that are placed as one, each never split.

        Example:
            def self_balance(self):
                return ["embed", *self.layers, [self.norm, self.head]]  # the last two are one block

        Returns:
            Modules, their qualified names, or groups of either: a list inside the list is one block. Any order.
            `None`, unless overridden: the blocks are found.
        """
        return None

    def forward_methods(self) -> Mapping[str, Sequence[str]]:
        """Methods other than `forward` by which a block is run.

        Example:
            def forward_methods(self):
                return {"vae": ["encode", "decode"]}

        Returns:
            Names of methods by the qualified name of the module that has them.
        """
        return {}

    def split_batch(self, batch: Any, n: int) -> Sequence[Any] | None:
        """The batch in parts, where tensors cannot be split along one dimension: graphs, packed tokens.

        It is asked while the run is planned, too, for a batch on the host. Parts that do not say how many samples they
        have, as `num_graphs` or by first dimensions that agree, need a `loss_weight`.

        Example:
            def split_batch(self, batch, n):
                graphs = batch.to_data_list()
                size = -(-len(graphs) // n)
                return [Batch.from_data_list(graphs[i : i + size]) for i in range(0, len(graphs), size)]

        Args:
            batch: what a step is given, on its device.
            n: how many parts are wanted; fewer may be given, and there are fewer micro-batches then.

        Returns:
            Parts, each like a batch, every sample in one of them, in the order of the batch: outputs of steps come in
            that of the parts. `None`, unless overridden: tensors, and lists with
            one item for each sample, are split along the dimension of the samples.
        """
        return None

    def loss_weight(self, batch: Any) -> Any:
        """By how much the loss of a part of a batch counts, where that is not its number of samples.

        Example:
            def loss_weight(self, batch):
                return (batch["labels"] != -100).sum()  # the loss is a mean over these tokens

        Args:
            batch: a part of a batch.

        Returns:
            A number, or a tensor without dimensions, in any unit: the parts' weights are divided by their sum. `None`,
            unless overridden: the number of samples.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base.__name__ == "LightningModule" and base.__module__.endswith(".core.module"):
                from autobalance.strategy.registration import register

                register(base.__module__.removesuffix(".core.module"))
